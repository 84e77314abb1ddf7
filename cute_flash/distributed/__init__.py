"""Context parallelism: exact attention of a sequence that is sharded over the ranks of a process group."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cute_flash.distributed.api import attn, attn_varlen, choose_method
    from cute_flash.distributed.choice import Choice
    from cute_flash.distributed.sharding import position_ids, shard, unshard

__all__ = ["Choice", "attn", "attn_varlen", "choose_method", "position_ids", "shard", "unshard"]

# The public names and their modules, imported on first use: `api` imports torch._dynamo, which takes a second.
_MODULES = {
    "Choice": "choice",
    "attn": "api",
    "attn_varlen": "api",
    "choose_method": "api",
    "position_ids": "sharding",
    "shard": "sharding",
    "unshard": "sharding",
}


if not TYPE_CHECKING:  # so that type checkers report unknown names

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
