"""Something that failed, and when it is tried again."""

from __future__ import annotations

from dataclasses import dataclass

RETRY_SECONDS = (0.5, 1.0, 2.0, 5.0)  # after the first failure in a row, the second, and so on


@dataclass(slots=True)
class Trouble:
    """How often it failed in a row. Times are the event loop's."""

    failures: int = 0
    until: float = 0.0  # not tried again before

    def __bool__(self) -> bool:
        return self.failures > 0

    def failed(self, now: float, *, hurried: bool) -> float:
        """It failed once more; the seconds until it may be tried again, which are few if ``hurried``."""
        self.failures += 1
        pause = RETRY_SECONDS[0 if hurried else min(self.failures, len(RETRY_SECONDS)) - 1]
        self.until = now + pause
        return pause

    def over(self) -> None:
        """It went well."""
        self.failures, self.until = 0, 0.0

    def may_try(self, now: float) -> bool:
        """Whether it may be tried now."""
        return not self.failures or now >= self.until

    def hurry(self) -> None:
        """It may be tried at once."""
        self.until = 0.0
