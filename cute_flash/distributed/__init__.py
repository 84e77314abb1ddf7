"""Context parallelism: exact attention of a sequence that is sharded over the ranks of a process group."""

from cute_flash.distributed.api import attn, attn_varlen, choose_method
from cute_flash.distributed.choice import Choice
from cute_flash.distributed.sharding import position_ids, shard, unshard

__all__ = ["Choice", "attn", "attn_varlen", "choose_method", "position_ids", "shard", "unshard"]
