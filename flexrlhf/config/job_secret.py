"""Secret of the machines of a job, which no port and no store ever has: the variable FLEXRLHF_TOKEN on each of them.

The job's store has no authentication, so texts in it that decide which code runs or where files go carry a tag that
only a machine with the secret can make. ``flexrlhf slurm`` sets the variable for all tasks of a job.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from dataclasses import dataclass
from typing import ClassVar, Self

from flexrlhf.errors import UserError

_VARIABLE = "FLEXRLHF_TOKEN"
LEAST_LENGTH = 32
"""Characters of a secret; a shorter one could be guessed from a tag."""


@dataclass(frozen=True)
class JobSecret:
    """Secret of a machine.

    value:  empty without one
    """

    VARIABLE: ClassVar[str] = _VARIABLE
    MAKE: ClassVar[str] = f"export {_VARIABLE}=$(openssl rand -hex 32)"
    """Command that sets a secret."""
    NO_SECRET: ClassVar[str] = (
        f"{_VARIABLE}: missing on this machine, whose directory of runs is not that of the first machine of the job; "
        f"set the same secret on all machines, or runs: to a directory that all of them mount"
    )

    value: str

    @classmethod
    def here(cls) -> Self:
        """Return the secret of this machine. Raises UserError for one that could be guessed."""
        secret = os.environ.get(cls.VARIABLE, "")
        if secret and len(secret) < LEAST_LENGTH:
            raise UserError(f"{cls.VARIABLE}: {len(secret)} characters, needs {LEAST_LENGTH}; {cls.MAKE}")
        return cls(secret)

    def signed(self, key: str, text: str) -> str:
        """Return ``text`` with its tag as the value of ``key``; the tag is empty without a secret."""
        return f"{self._tag(key, text)}\n{text}"

    def verified(self, key: str, value: str) -> str:
        """Return the text of ``key`` that another machine has signed.

        Raises UserError unless both have the same secret, or none.
        """
        tag, _, text = value.partition("\n")
        if hmac.compare_digest(tag.encode(), self._tag(key, text).encode()):
            return text
        if not self.value:
            raise UserError(self.NO_SECRET)
        if not tag:
            problem = "this machine has one, the first machine of the job has none"
        else:
            problem = "this machine's is not that of the first machine of the job"
        raise UserError(f"{self.VARIABLE}: {problem}; set the same secret on all machines")

    def derived_token(self, nonce: str) -> str:
        """Return the token of one job, which follows from the secret and a nonce."""
        return self._tag("token", nonce)

    def _tag(self, key: str, text: str) -> str:
        message = f"{key}\n{text}".encode()
        return hmac.new(self.value.encode(), message, hashlib.sha256).hexdigest() if self.value else ""
