"""A stage that has no communication for a schedule to do.

Its actions receive and send by themselves, so it answers with empty lists when a
schedule asks for send and receive operations, and ignores what a schedule hands over
between two stages of one rank. `scale_grads` is ignored as well: upstream 2.9 calls it
in `eval` too, and not after the backward-weight actions of `_PipelineScheduleRuntime`.
"""

from typing import Any

import torch.distributed as dist

from torch_xla_pp.runtime.torch_compat import StageBase


class SilentStage(StageBase):
    """Answer a schedule's questions about communication: there is none."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return nothing: there is no connection to set up."""
        return []

    def _prepare_backward_infra(self, num_microbatches: int) -> None:
        """Do nothing: a backward needs no buffers and no agreement of its own."""

    def _create_grad_recv_info(self, act_send_info: dict[Any, Any]) -> tuple[Any, ...]:
        """Return nothing: gradients are received by the backward itself."""
        return ()

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Do nothing: gradients were scaled on their way, see `runtime.stage`."""

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return nothing: the forward receives by itself."""
        return []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return nothing: the forward sends by itself."""
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return nothing: the backward receives by itself."""
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return nothing: the backward sends by itself."""
        return []

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Do nothing: stages of one rank hand values over by themselves."""

    def get_local_bwd_output(self, mb_index: int) -> tuple[Any, ...]:
        """Return nothing: stages of one rank hand gradients over by themselves."""
        return ()

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Any, ...], mb_index: int
    ) -> None:
        """Do nothing: stages of one rank hand gradients over by themselves."""
