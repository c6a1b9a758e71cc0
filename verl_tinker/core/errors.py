"""Every refusal the server can give, one exception type each, with its category and its text.

Owns the wording of refusals. Does not decide the HTTP status of a call: `verl_tinker.api.errors` does.
"""

from __future__ import annotations

import re

# In quotes a path may hold blanks. The addresses of our own routes and of checkpoints are no paths of the machine.
_QUOTED = re.compile(r"""(['"])/(?!api/v1/)[^'"\n]*/([^'"/\n]*)\1""")
_BARE = re.compile(r"(?<![\w/:.~])~?/(?!api/v1/)(?:[\w.@+,=-]+/)+(?=[\w.@+-])")


class TinkerError(Exception):
    """A refusal with a text for the user: what is wrong, in which field, and what to do.

    `category` is the wire's word for whose fault it is: "user" or "server".
    """

    category = "server"

    @property
    def told(self) -> str:
        """The text as clients get it: what went wrong inside the server may have been put into words by anybody."""
        return without_paths(str(self))


class UserError(TinkerError):
    """The request cannot be honoured as it stands; the text names the field and the remedy."""

    category = "user"

    @property
    def told(self) -> str:
        return str(self)


class NotFound(UserError):
    """A model, session, sampler, checkpoint or future that this server does not know."""


class Evicted(UserError):
    """A version that was sampleable once and is not any more; never answered with other weights."""


class CapacityError(UserError):
    """The server has no room for another training run."""


class StorageError(TinkerError):
    """The disk refused a write, and nothing half-made is left; or it has lost what was written."""


class EngineError(TinkerError):
    """The engine failed; nothing was applied unless the text says otherwise."""


class Unresponsive(EngineError):
    """A worker did not answer in time; what it was asked may still be going on."""


class WorkerDied(EngineError):
    """A worker's process ended; what it was asked is not done."""


class SyncError(EngineError):
    """Sampler and trainer disagree after a weight transfer; the version is not served."""


class WrongWeights(EngineError):
    """Other weights answered than were asked for; the answer is not returned, and counted."""


class RunLost(TinkerError):
    """A training run that this server once held and holds no more, through no fault of its user."""


class Overloaded(TinkerError):
    """Too many requests wait already; nothing was registered, and the same call may be sent again."""


class StateInUse(TinkerError):
    """Another live server keeps its state in the same folder."""


def without_paths(text: str) -> str:
    """The text with every path of this machine cut to its last part, which clients may know."""
    return _BARE.sub("", _QUOTED.sub(r"\1\2\1", text))
