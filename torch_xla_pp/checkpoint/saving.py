"""Write a checkpoint while all ranks wait, or while training goes on.

A save has three parts. The ranks agree on which of them writes what; each writes its
files; all meet, the first one writes the metadata and gives the folder its name, and
all meet again. Only the first part communicates within a generation of the rendezvous,
as a step does. The others may run in a thread of their own: errors there are exchanged
when the ranks meet, and raised by the next call.
"""

import functools
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from os import PathLike
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import WriteResult

from torch_xla_pp import cpu
from torch_xla_pp.checkpoint import folders
from torch_xla_pp.checkpoint.planners import LoadPlanner, SavePlanner
from torch_xla_pp.checkpoint.state import State
from torch_xla_pp.checkpoint.storage import Reader, Writer
from torch_xla_pp.errors import CheckpointError
from torch_xla_pp.transport import Rendezvous, XlaPpProcessGroup

_logger = logging.getLogger(__name__)


Saved = State | Mapping[str, Any]


def save(
    state: Saved,
    checkpoint_id: str | PathLike[str],
    *,
    keep_last: int | None = None,
) -> Path:
    """Save a run; all ranks must call it, between two steps.

    The folder gets its name when all is written. Until then, and if something goes
    wrong, the previous folder of that name stays. Waits for an asynchronous save.

    Args:
        state: A `State`, or a dict of stateful objects and values with one in it.
        checkpoint_id: The folder, on storage that all ranks share.
        keep_last: How many of the checkpoints in the folder above are kept, this one
            included; those with the largest numbers at the end of their names. None
            keeps all.

    Returns:
        The folder.

    Raises:
        CheckpointError: It cannot be written, on every rank.
        TransportError: A rank is gone.

    Example:
        >>> save(state, f"checkpoints/step-{step}", keep_last=3)
    """
    group = _group_of(state)
    _wait(group)
    saving = _Saving(group, Path(checkpoint_id), keep_last)
    saving.agree(state)
    with cpu.copying_large_values():
        saving.run()
    return saving.path


def async_save(
    state: Saved,
    checkpoint_id: str | PathLike[str],
    *,
    keep_last: int | None = None,
    while_saving: Literal["wait", "refuse"] = "wait",
) -> "Future[Path]":
    """Save a run as it is now, and return as soon as its values are being copied.

    The devices then hold one copy of what this rank writes, made by a program that is
    compiled at the first call; each tensor of it is freed when it has been read.
    Training may go on at once, and update parameters and sums in place. Errors while
    bytes are written are raised by the future, and by the next call of `save`, `load`
    or `async_save`, on every rank.

    Args:
        state: As for `save`.
        checkpoint_id: As for `save`.
        keep_last: As for `save`.
        while_saving: What to do if the one before is still being written: "wait" for
            it, or "refuse", an error on every rank.

    Returns:
        A future of the folder, done when the folder is complete. Neither is the process
        group destroyed before, nor does the program end.

    Raises:
        ValueError: `while_saving` is something else.
        CheckpointError: As by `save`; or one is being written, or has failed.
    """
    group = _group_of(state)
    if while_saving not in ("wait", "refuse"):
        raise ValueError(
            f"while_saving: expected 'wait' or 'refuse', got {while_saving!r}. Pass "
            "one of them."
        )
    if while_saving == "refuse":
        _refuse_second(group)
    _wait(group)
    saving = _Saving(group, Path(checkpoint_id), keep_last)
    saving.agree(state)
    saving.stage()
    _running()[group] = saving
    group.unfinished.add(saving.future)
    saving.future.add_done_callback(group.unfinished.discard)
    saving.start()
    return saving.future


def load(
    state: Saved,
    checkpoint_id: str | PathLike[str],
    *,
    strict: bool = True,
) -> None:
    """Load what `save` or torch.distributed.checkpoint has written, on any ranks.

    All ranks must call it. Each reads what its own stages need. Nothing is changed
    before all ranks have read it all. Gradients are no part of a checkpoint: `.grad`
    stays what it is.

    Args:
        state: As for `save`.
        checkpoint_id: The folder.
        strict: Whether names that are missing, unexpected or of another shape are an
            error. Otherwise what fits by name is loaded.

    Raises:
        CheckpointError: It is of another model, damaged or not there; on every rank.
    """
    group = _group_of(state)
    _wait(group)
    path = folders.existing(checkpoint_id)
    rendezvous = group.rendezvous
    # What is loaded may be trained, also if the caller is in inference mode.
    with rendezvous.reporting(f"loading {path}"), torch.inference_mode(False):
        _check_alike(rendezvous.exchange("checkpoint: folder", str(path)))
        reader, planner = Reader(path), LoadPlanner(strict=strict)
        contents = _contents(state)
        metadata = reader.read_metadata()
        planner.set_up_planner(contents, metadata, rendezvous.rank == 0)
        reader.set_up_storage_reader(metadata, rendezvous.rank == 0)
        plan = reader.prepare_local_plan(_local_plan(planner, path))
        reader.read_data(planner.finish_plan(plan), planner)
        rendezvous.exchange("checkpoint: read", reader.num_bytes)
        _give_back(state, contents)


def _local_plan(planner: LoadPlanner, path: Path) -> Any:
    try:
        return planner.create_local_plan()
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: expected what the state has, got {error}. Load what fits."
        ) from error


class _Saving:
    """A save of this rank.

    Args:
        group: The ranks that save.
        path: The folder.
        keep_last: How many checkpoints to keep.

    Attributes:
        path: The folder.
        future: Gives it when it is complete.
    """

    def __init__(
        self, group: XlaPpProcessGroup, path: Path, keep_last: int | None
    ) -> None:
        self.path = path
        self.future: Future[Path] = Future()
        self._keep_last = keep_last
        self._rendezvous: Rendezvous = group.rendezvous
        self._hold: folders.Hold | None = None
        self._planner = SavePlanner(shares=True)

    def agree(self, state: Saved) -> None:
        """Agree with the other ranks on which of them writes what."""
        with self._rendezvous.reporting(f"saving {self.path}"):
            try:
                self._agree(state)
            except BaseException:
                self._give_up()
                raise

    def _agree(self, state: Saved) -> None:
        rendezvous, planner = self._rendezvous, self._planner
        _check_options(self.path, self._keep_last)
        self._writer = writer = Writer(folders.partial_of(self.path))
        is_first = rendezvous.rank == 0
        if is_first:
            self._hold = _try(f"make {self.path}", self._begin)
        planner.set_up_planner(_contents(state), writer.storage_meta(), is_first)
        writer.set_up_storage_writer(is_first)
        own = planner.create_local_plan()
        exchanged = rendezvous.exchange("checkpoint: plan", (str(self.path), own))
        _check_alike([path for path, _ in exchanged])
        plans, self._metadata = planner.create_global_plan(
            [plan for _, plan in exchanged]
        )
        plans = writer.prepare_global_plan(plans)
        self._plan: SavePlan = planner.finish_plan(plans[rendezvous.rank])

    def _begin(self) -> folders.Hold:
        folders.check_replaceable(self.path)
        return folders.Hold(folders.begin(self.path))

    def _give_up(self) -> None:
        """Remove what this rank has written, not what other programs write."""
        if self._hold is not None:
            folders.drop(self.path)
            self._hold.release()

    def stage(self) -> None:
        """Copy what this rank writes."""
        with self._rendezvous.reporting():
            try:
                self._planner.stage(self._plan)
            except BaseException:
                self._give_up()
                raise

    def start(self) -> None:
        """Start to write in a thread of its own."""

        def run() -> None:
            try:
                self.run()
            except BaseException as error:
                _logger.error("%s was not saved: %s", self.path, error)
                self.future.set_exception(error)
            else:
                self.future.set_result(self.path)

        threading.Thread(target=run, name="checkpoint").start()

    def run(self) -> None:
        """Write, and wait until all have.

        Raises:
            CheckpointError: A rank could not; on every rank.
        """
        try:
            written, fault = _outcome(f"write {self.path}", self._write)
            exchanged = self._meet("written", (written, fault))
            _raise_first([fault for _, fault in exchanged])
            fault = None
            if self._rendezvous.rank == 0:
                results = [results for results, _ in exchanged]
                _, fault = _outcome(
                    f"finish {self.path}", lambda: self._finish(results)
                )
            _raise_first([fault for fault in self._meet("finished", fault)])
        except BaseException:
            self._give_up()
            raise
        if self._hold is not None:
            self._hold.release()

    def _write(self) -> list[WriteResult]:
        done = self._writer.write_data(self._plan, self._planner)
        results: list[WriteResult] = done.value()
        return results

    def _finish(self, results: list[list[WriteResult]]) -> None:
        metadata: Metadata = self._metadata
        every = [self._planner.with_aliases(own) for own in results]
        self._writer.finish(metadata, every)
        folders.publish(self.path)
        if self._keep_last is not None:
            folders.keep(self.path, self._keep_last)

    def _meet(self, what: str, value: Any) -> list[Any]:
        rendezvous = self._rendezvous
        return rendezvous.meet(f"checkpoint: {what}", rendezvous.timeout_s, value)


@functools.cache
def _running() -> WeakKeyDictionary[XlaPpProcessGroup, _Saving]:
    """Return the last asynchronous save of each group of this process."""
    return WeakKeyDictionary()


def _wait(group: XlaPpProcessGroup) -> None:
    """Wait for the last asynchronous save, and raise its error, once."""
    saving = _running().pop(group, None)
    if saving is not None:
        saving.future.result()


def _refuse_second(group: XlaPpProcessGroup) -> None:
    """Raise on every rank if any still writes."""
    saving = _running().get(group)
    is_writing = saving is not None and not saving.future.done()
    exchanged = group.rendezvous.exchange("checkpoint: writing", is_writing)
    if any(exchanged):
        where = "" if saving is None else f" to {saving.path}"
        raise CheckpointError(
            f"async_save: expected the save before to be done, got one that still "
            f"writes{where}. Save less often, or pass while_saving='wait'."
        )


def _group_of(state: Saved) -> XlaPpProcessGroup:
    """Return the ranks that save or load.

    Raises:
        TypeError: There is no `State`.
        RuntimeError: The ranks have left each other.
    """
    values = state.values() if isinstance(state, Mapping) else [state]
    found = [value.group for value in values if isinstance(value, State)]
    if not found:
        got = sorted(state) if isinstance(state, Mapping) else type(state).__name__
        raise TypeError(
            f"checkpoint: expected a State or a dict with one, got {got}. Make a State "
            "of the stages."
        )
    if found[0].is_left:
        raise RuntimeError(
            "checkpoint: expected a process group that is joined, got one that was "
            "destroyed. Save and load before destroy_process_group."
        )
    return found[0]


def _check_options(path: Path, keep_last: int | None) -> None:
    if not path.name:
        raise ValueError(
            f"checkpoint_id: expected the path of a folder, got {str(path)!r}, which "
            "has no name. Pass one, e.g. checkpoints/step-1."
        )
    if keep_last is not None and (not isinstance(keep_last, int) or keep_last < 1):
        raise ValueError(
            f"keep_last: expected 1 or more, got {keep_last!r}. Pass None to keep all."
        )


def _check_alike(paths: list[str]) -> None:
    """Refuse different checkpoints, say because a rank sees the last one too late."""
    if len(set(paths)) > 1:
        listed = "; ".join(f"rank {rank}: {own}" for rank, own in enumerate(paths))
        raise CheckpointError(
            f"checkpoint: expected one folder on all ranks, got {listed}. Let one rank "
            "call latest, and send the result to the others."
        )


def _contents(state: Saved) -> dict[str, Any]:
    if isinstance(state, State):
        return state.state_dict()
    return {
        key: value.state_dict() if isinstance(value, Stateful) else value
        for key, value in state.items()
    }


def _give_back(state: Saved, contents: dict[str, Any]) -> None:
    if isinstance(state, State):
        state.load_state_dict(contents)
        return
    for key, value in state.items():
        if isinstance(value, Stateful):
            value.load_state_dict(contents[key])
        elif isinstance(state, dict):
            state[key] = contents[key]


def _outcome(what: str, function: Any) -> tuple[Any, str | None]:
    """Return the result of a function, or its error."""
    try:
        return _try(what, function), None
    except CheckpointError as error:
        return None, str(error)


def _try(what: str, function: Any) -> Any:
    """Call a function that writes.

    Raises:
        CheckpointError: In place of any other error.
    """
    try:
        return function()
    except CheckpointError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"checkpoint: expected to {what}, got {text}. Look at the storage; "
            "checkpoints from before are still there."
        ) from error


def _raise_first(faults: list[str | None]) -> None:
    for rank, fault in enumerate(faults):
        if fault is not None:
            raise CheckpointError(f"{fault} (rank {rank})")
