"""A stage's programs by themselves: one process, one core, no messages.

Both measurements wait for the device around each program. The sides take turns;
medians over the turns are returned. `step_time.py` runs them.
"""

import copy
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import gpt
import torch
from pinning import check_pinned, pin
from torch import Tensor, nn

ROUNDS = 7
WARM_UP = 2
NUM_LAYERS = (1, 2, 4, 8)


class Alone:
    """The programs of a middle stage as a rank has them, with what they read."""

    def __init__(
        self, module: nn.Module, x: Tensor, grad: Tensor, products: str = "best"
    ) -> None:
        import torch_xla_pp as xpp
        from torch_xla_pp import cpu, xla_compat
        from torch_xla_pp.compile import StagePrograms, ValueSizes, export_joint
        from torch_xla_pp.compile.attention_calls import has_call
        from torch_xla_pp.runtime.gradients.sums import SumPrograms
        from torch_xla_pp.state.saved import FreeValues

        device = xpp.device()
        whole = xla_compat.replicated_sharding()

        def upload(value: Tensor) -> Tensor:
            data = value.detach().to(device)
            xla_compat.annotate(data, whole)
            xla_compat.materialize([data])
            return data

        module = copy.deepcopy(module).to(device)
        named = dict(module.named_parameters())
        example = torch.empty(x.shape, device=device, requires_grad=True)
        stays = has_call if products == "best" else None
        joint = export_joint(module, [example], {}, stays=stays)
        self.fixed = {f"param:{name}": upload(value) for name, value in named.items()}
        shardings = dict.fromkeys(self.fixed, whole)
        self.programs = StagePrograms(
            joint,
            [whole],
            [whole],
            shardings,
            rules=rules_of(products),
            is_recycling=cpu.is_recycling(),
        )
        self._free, self._sizes = FreeValues(), ValueSizes()
        self._sum_programs = SumPrograms(self.programs.summed)
        self.sums = self._sum_programs.start(self.fixed, {})
        self.x, self.grad = upload(x), upload(grad)
        self.live: dict[str, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}
        self.input_grads: dict[int, Tensor | None] = {}
        self.wait = xla_compat.wait_device

    def forward(self) -> None:
        """Run the forward; its values are for one backward of either kind."""
        values = {"input:0": self.x, **self._storages("forward")}
        done = self.programs.forward(self.fixed, values, 0)
        self.outputs, self.live = done.outputs, done.live
        self.live["tangent:0"] = self.grad
        self.wait()

    def backward(self) -> None:
        """Run the full backward."""
        fixed = {**self.fixed, **self.sums}
        self.input_grads, self.sums = self.programs.backward(fixed, self.live)
        self._keep(self.live)
        self.wait()

    def both(self) -> None:
        """Run a forward and its full backward."""
        self.forward()
        self.backward()

    def backward_input(self) -> None:
        """Run the first half of the split backward."""
        given = self.live
        values = {**given, **self._storages("backward input")}
        _, self.live = self.programs.backward_input(self.fixed, values)
        self._keep(given, self.live)
        self.wait()

    def backward_weight(self) -> None:
        """Run the other half."""
        fixed = {**self.fixed, **self.sums}
        self.sums = self.programs.backward_weight(fixed, self.live)
        self._keep(self.live)
        self.wait()

    def gradients(self) -> dict[str, Tensor]:
        """Return the sums by the names of parameters."""
        sums = self._sum_programs.apart(self.sums)
        return {name.removeprefix("sum:param:"): x for name, x in sums.items()}

    def _storages(self, program: Any) -> dict[str, Tensor]:
        """Return memory for what a program saves, as far as there is some."""
        names = self.programs.recycled(program)
        found = self._free.take(names, self._sizes)
        return {names[name]: value for name, value in found.items()}

    def _keep(self, read: Mapping[str, Tensor], needed: Collection[str] = ()) -> None:
        """Keep the memory of what a program has read and no other one needs."""
        values = self.programs.recycled_in(read, needed)
        self._sizes.add(values)
        self._free.put(values, self._sizes)


def rules_of(products: str) -> tuple[Any, ...]:
    """Return how operations are run: as "best" as a rank can, or all by "xla"."""
    from torch_xla_pp.compile import library_rules

    return library_rules() if products == "best" else ()


def split_backward(size_name: str, core: int) -> list[dict[str, Any]]:
    """Compare the two halves of a backward with the whole, for stage 1 of 4."""
    pin(core)
    size = gpt.SIZES[size_name]
    alone = Alone(gpt.make_part(1, 4, size), *activations(size))
    seconds = medians(
        {
            "forward": alone.forward,
            "full": alone.backward,
            "forward again": alone.forward,
            "input": alone.backward_input,
            "weight": alone.backward_weight,
        }
    )
    check_pinned(core)
    row: dict[str, Any] = {"what": "split_backward", "model": size_name}
    row |= {f"{name}_ms": seconds[name] * 1e3 for name in ("full", "input", "weight")}
    row["split_ratio"] = (seconds["input"] + seconds["weight"]) / seconds["full"]
    return [row]


def layers(size_name: str, core: int) -> list[dict[str, Any]]:
    """Measure forward and backward per layer, of programs of several sizes."""
    pin(core)
    size = gpt.SIZES[size_name]
    rows = []
    for count in NUM_LAYERS:
        module = gpt.make_part(1, 3, size | {"layers": 3 * count})
        seconds = _beside_eager(module, size)
        ours_ms, eager_ms = (s * 1e3 / count for s in seconds.values())
        rows.append(
            {
                "what": "layers",
                "model": size_name,
                "layers": count,
                "per_layer_ms": ours_ms,
                "eager_per_layer_ms": eager_ms,
                "ratio": ours_ms / eager_ms,
            }
        )
    check_pinned(core)
    return rows


def _beside_eager(module: nn.Module, size: dict[str, int]) -> dict[str, float]:
    """Return the seconds of forward and backward as programs, and of eager PyTorch."""
    x, grad = activations(size)
    ours = Alone(module, x, grad).both
    return medians({"ours": ours, "eager": lambda: module(x).backward(grad)})


def activations(size: dict[str, int]) -> tuple[Tensor, Tensor]:
    """Return an input that needs a gradient, and the gradient of an output."""
    torch.manual_seed(0)
    shape = (gpt.ROWS, size["length"], size["width"])
    return torch.randn(shape, requires_grad=True), torch.randn(shape)


def medians(
    calls: dict[str, Callable[[], Any]], rounds: int = ROUNDS
) -> dict[str, float]:
    """Run all calls in turn, several times; return the median seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for attempt in range(WARM_UP + rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if attempt >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}
