"""The activity of a rank, for the texts of errors."""

from dataclasses import dataclass


@dataclass(slots=True)
class Activity:
    """The present step and action of a rank; prints as the end of a sentence.

    Attributes:
        stages: The stages of the rank.
        step: Number of the step, counted from 1; 0 before the first one.
        is_in_step: Whether that step has not ended.
        num_ended: How many steps have ended.
        action: The running action, e.g. "1F3, microbatch 3"; empty outside of one. A
            failed action stays noted until the next one.
    """

    stages: tuple[int, ...] = ()
    step: int = 0
    is_in_step: bool = False
    num_ended: int = 0
    action: str = ""

    def begin_step(self, number: int) -> None:
        """Note the beginning of a step."""
        self.step, self.is_in_step, self.action = number, True, ""

    def end_step(self) -> None:
        """Note the end of a step."""
        self.is_in_step = False
        self.num_ended += 1

    def __str__(self) -> str:
        if not self.stages:
            return ""
        names = ", ".join(map(str, self.stages))
        stages = f"stage{'s' * (len(self.stages) > 1)} {names}"
        if not self.step:
            return f"{stages}, before the first step"
        if not self.is_in_step and not self.action:
            return f"{stages}, after step {self.step}"
        action = f", {self.action}" if self.action else ""
        return f"{stages}, step {self.step}{action}"
