"""A hotel's porter, the agent of agent.yaml: it acts by what it says, such as "I will bring you a new candle"."""

from __future__ import annotations


class Porter:
    """One guest with a question, which the data have. Public methods are tools; ``reward`` is that of the episode."""

    def reset(self, prompt: str, **columns: object) -> str:
        """Begin an episode with the columns of a row; the text returned would stand behind the prompt."""
        self._question, self.reward = prompt, 0.0
        return ""

    def bring(self, thing: str) -> str:
        """Bring a new thing to the guest.

        Args:
            thing: What the guest needs.
        """
        return self._serve(thing)

    def fix(self, thing: str) -> str:
        """Repair a thing in the guest's room.

        Args:
            thing: What is broken.
        """
        return self._serve(thing)

    def _serve(self, thing: str) -> str:
        """Return the guest's reply, which the policy reads before its next turn."""
        if thing not in self._question:
            return " I do not need that."
        self.reward = 1.0
        return " Thank you!"
