"""All peers by name. A new peer is one line in `registry`."""

from __future__ import annotations

from collections.abc import Sequence

from torch.nn.attention import SDPBackend

from profiling.peers.cute_flash import our_peer, peer_with_tiles_of
from profiling.peers.ffpa import ffpa_peer
from profiling.peers.flash_attention import FA4, bshd_peer, fa2_forward, fa3_backward, fa3_forward, fa4_forward
from profiling.peers.flex import flex_peer
from profiling.peers.peer import UP_TO_256, Peer
from profiling.peers.sdpa import sdpa_peer


def registry(kernels: str = "auto") -> dict[str, Peer]:
    """All peers by name, ours first. `kernels` is the family that `cute_flash` runs."""
    peers: list[Peer] = [
        our_peer(kernels=kernels),
        # By name only: to compare the families in one run.
        our_peer("cute_flash-sm80", "sm80"),
        our_peer("cute_flash-sm90", "sm90"),
        # The mma.sync kernels as an A100 and a GPU with 99 KB of shared memory would run them.
        peer_with_tiles_of("A100"),
        peer_with_tiles_of("L40S"),
        sdpa_peer("sdpa-flash", SDPBackend.FLASH_ATTENTION, UP_TO_256),
        sdpa_peer("sdpa-cudnn", SDPBackend.CUDNN_ATTENTION, UP_TO_256),
        sdpa_peer("sdpa-efficient", SDPBackend.EFFICIENT_ATTENTION),
        # By name only: it compiles for every cell.
        flex_peer(),
        # By name only: it takes wide heads only.
        ffpa_peer(),
        bshd_peer("fa3", fa3_forward, fa3_backward),
        bshd_peer(FA4, fa4_forward),
        bshd_peer("flash_attn", fa2_forward),
    ]
    return {peer.name: peer for peer in peers}


BY_NAME_ONLY = ("cute_flash-sm80", "cute_flash-sm90", "cute_flash-A100", "cute_flash-L40S", "flex", "ffpa")
OURS = tuple(name for name, peer in registry().items() if peer.is_ours)
DEFAULT_NAMES = tuple(name for name in registry() if name not in BY_NAME_ONLY)


def select(names: Sequence[str], kernels: str = "auto") -> list[Peer]:
    known = registry(kernels)
    for name in names:
        if name not in known:
            raise ValueError(f"peer {name!r}: choose from {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)]


def split_available(peers: Sequence[Peer], direction: str = "fwd") -> tuple[list[Peer], dict[str, str]]:
    """The peers that can run a direction here, and the reason for each of the others."""
    reasons = {peer.name: peer.available(direction) for peer in peers}
    unavailable = {name: reason for name, reason in reasons.items() if reason is not None}
    return [peer for peer in peers if peer.name not in unavailable], unavailable
