"""Every refusal the server can give, one exception type each, with its category and its text.

Owns the wording of refusals. Does not decide the HTTP status of a call: `verl_tinker.api.errors` does.
"""

from __future__ import annotations


class TinkerError(Exception):
    """A refusal with a text for the user: what is wrong, in which field, and what to do.

    `category` is the wire's word for whose fault it is: "user" or "server".
    """

    category = "server"


class UserError(TinkerError):
    """The request cannot be honoured as it stands; the text names the field and the remedy."""

    category = "user"


class NotFound(UserError):
    """A model, session, sampler, checkpoint or future that this server does not know."""


class Evicted(UserError):
    """A version that was sampleable once and is not any more; never answered with other weights."""


class CapacityError(UserError):
    """The server has no room for another training run."""


class StorageError(TinkerError):
    """The disk refused a write; what was there before stands, and nothing half-made is left."""


class EngineError(TinkerError):
    """The engine failed; nothing was applied unless the text says otherwise."""


class Unresponsive(EngineError):
    """A worker did not answer in time; what it was asked may still be going on."""


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
