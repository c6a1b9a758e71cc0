"""The flags that the server chooses for its clients.

Owns the answers of client/config and client/dynamic_config. Does not enforce them: clients do.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# A superset for SDKs 0.19 to 0.38, which ignore what they do not know. The three flags that only older SDKs
# read make them send the same requests as 0.38.
CLIENT_CONFIG = MappingProxyType(
    {
        "pjwt_auth_enabled": False,
        "credential_default_source": "api_key",
        "parallel_fwdbwd_chunks": True,
        "proto_compress_fwdbwd": True,
        # Far below the body limit: a chunk that is refused for its size deadlocks the client.
        "fwdbwd_max_chunk_len": 4096,
        "fwdbwd_max_chunk_bytes_count": 16_000_000,
        "fwdbwd_dispatch_bytes_semaphore_size": 64_000_000,
        "sample_no_retries": False,
        "sample_max_concurrent_requests": 1000,
        "use_pyqwest_transport": True,
        # A client that follows a list of completions is never told that a restarted server does not know its samples.
        "sample_use_retrieve_futures": False,
        "custom_loss_server_side": False,
        "sample_join_sampling_session": True,
        "proto_write_fwdbwd": True,
        "fwd_via_fwdbwd": True,
        "create_model_via_load_weights": True,
    }
)

DYNAMIC_CONFIG = MappingProxyType({"refresh_interval_sec": 300, "sample_cancel_enabled": True})


# What this server has no routes for.
_FIXED = ("pjwt_auth_enabled", "custom_loss_server_side")
# Of `verl_tinker.api.body`, with room: a chunk that is refused for its size deadlocks the client, whose count is a guess.
MOST = MappingProxyType({"fwdbwd_max_chunk_len": 16_384, "fwdbwd_max_chunk_bytes_count": 32 << 20})
_WORDS = {bool: "true or false", int: "a whole number from 1 on", str: "api_key or credential_cmd"}


def chosen(changes: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The answers of client/config and client/dynamic_config with some flags changed; ValueError begins with the flag."""
    known = {**CLIENT_CONFIG, **DYNAMIC_CONFIG}
    for flag, value in changes.items():
        if flag not in known:
            raise ValueError(f"{flag} is not a flag that clients know; there are {', '.join(known)}")
        _check(flag, value, type(known[flag]))
    return tuple(
        {flag: changes.get(flag, value) for flag, value in config.items()} for config in (CLIENT_CONFIG, DYNAMIC_CONFIG)
    )


def _check(flag: str, value: Any, kind: type) -> None:
    if type(value) is not kind or (kind is int and value < 1) or (kind is str and value not in _WORDS[str].split(" or ")):
        raise ValueError(f"{flag} is {value!r}; it must be {_WORDS[kind]}")
    if flag in _FIXED and value:
        raise ValueError(f"{flag} must be false: this server has no route for it")
    if value > MOST.get(flag, value):
        raise ValueError(f"{flag} is {value}; it must be at most {MOST[flag]}, which the server takes in one request")
