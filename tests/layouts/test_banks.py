"""Bank conflicts against an independent model: addresses from formulas, wavefronts by simulation of the banks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layouts import (
    ACCESSES,
    VARIANTS,
    Layout,
    Phase,
    SmemTile,
    Vector,
    cp_async_write,
    layout_of,
    ldmatrix_a,
    ldmatrix_b,
    ldmatrix_v,
    load_rows,
    store_fragment,
    tile_report,
    transposed,
    warp_access,
)
from layouts.banks import CopyPhase

deterministic = settings(derandomize=True, deadline=None, max_examples=60)


def serve(addresses: list[int], width: int) -> int:
    """Wavefronts by simulation: in each, every bank delivers one of the words that are still needed."""
    waiting = {word for address in addresses for word in range(address // 4, (address + width) // 4)}
    wavefronts = 0
    while waiting:
        waiting -= set({word % 32: word for word in sorted(waiting)}.values())
        wavefronts += 1
    return wavefronts


def chunk_address(variant: str, rows: int, cols: int, row: int, chunk: int) -> int:
    """The byte address of a 16-byte chunk in a tile of 2-byte elements, by the definition of the layout."""
    if variant == "plain":
        return row * cols * 2 + chunk * 16
    if variant == "padded":
        return row * (cols * 2 + 16) + chunk * 16
    if cols % 64 == 0:
        return chunk // 8 * rows * 128 + row * 128 + (chunk % 8 ^ row % 8) * 16
    return chunk // 4 * rows * 64 + row * 64 + (chunk % 4 ^ row // 2 % 4) * 16


def serve_copy(chunks: list[tuple[int, int]]) -> int:
    """Wavefronts of the (source, target) chunks of a warp's cp.async, by simulation.

    A wavefront moves sectors from one source line to one target line, each source sector to one target sector.
    """
    waiting = {(source // 32, target // 32) for source, target in chunks}
    wavefronts = 0
    while waiting:
        lines = (min(waiting)[0] // 4, min(waiting)[1] // 4)
        fitting = [pair for pair in sorted(waiting) if (pair[0] // 4, pair[1] // 4) == lines]
        waiting -= set(dict(reversed(fitting)).items())
        wavefronts += 1
    return wavefronts


def brute_force(variant: str, rows: int, cols: int) -> dict[str, int]:
    def at(row: int, chunk: int) -> int:
        return chunk_address(variant, rows, cols, row, chunk)

    # A matrix is 8 rows of one chunk. The order of the four matrices of an x4 does not change the phases.
    chunks = range(cols // 8)
    matrices = sum(serve([at(row + i, c) for i in range(8)], 16) for row in range(0, rows, 8) for c in chunks)
    # Eight threads copy one row of 128 bytes, or two rows of 64.
    if cols % 64 == 0:
        groups = [[(row, c + i) for i in range(8)] for row in range(rows) for c in range(0, cols // 8, 8)]
    else:
        pairs = [(row, c) for row in range(0, rows, 2) for c in range(0, cols // 8, 4)]
        groups = [[(row + i, c + j) for i in range(2) for j in range(4)] for row, c in pairs]
    loads = sum(serve([at(*spot) for spot in group], 16) for group in groups)
    # An instruction of a warp has four of these groups: four rows, or eight.
    height, width = (4, 8) if cols % 64 == 0 else (8, 4)
    copies = 0
    for row in range(0, rows, height):
        for c in range(0, cols // 8, width):
            spots = [(row + i, c + j) for i in range(height) for j in range(width)]
            copies += serve_copy([(cols * 2 * i + 16 * j, at(i, j)) for i, j in spots])
    # A register of an accumulator: 8 rows of four 4-byte pairs.
    stores = sum(
        serve([at(row + i, c) + 4 * j for i in range(8) for j in range(4)], 4)
        for row in range(0, rows, 8)
        for c in chunks
    )
    return {
        "ldmatrix_a": matrices,
        "ldmatrix_b": matrices,
        "ldmatrix_v": matrices,
        "cp_async_write": copies,
        "store_fragment": stores,
        "load_rows": loads,
    }


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("rows", "cols"), [(64, 64), (32, 128), (32, 96), (32, 32), (16, 160), (48, 192)])
def test_addresses_and_report_agree_with_brute_force(rows: int, cols: int, variant: str) -> None:
    tile = SmemTile(rows, cols, variant=variant)
    for row in range(rows):
        for chunk in range(cols // 8):
            assert 2 * layout_of(tile)(row, 8 * chunk) == chunk_address(variant, rows, cols, row, chunk)
    assert {name: access.wavefronts for name, access in tile_report(tile).items()} == brute_force(variant, rows, cols)


# Head dim, keys of a block, variant -> cp.async wavefronts of the forward, counted by instruction: 16
# heads of 2048 queries and keys, 256 tiles of 128 rows.
COUNTED = {
    (128, 48, "swizzled"): 2179072,
    (128, 48, "plain"): 2179072,
    (128, 48, "padded"): 5693440,
    (96, 64, "swizzled"): 3244032,
    (96, 64, "padded"): 6082560,
}


@pytest.mark.parametrize(("case", "counted"), COUNTED.items(), ids=str)
def test_copies_are_those_that_an_h200_counts(case: tuple[int, int, str], counted: int) -> None:
    head_dim, keys, variant = case
    q, k = (cp_async_write(SmemTile(rows, head_dim, variant=variant)) for rows in (128, keys))
    num_blocks = -(-2048 // keys)
    found = 256 * (q.wavefronts + 2 * num_blocks * k.wavefronts)
    # Rows beyond the end, in K and V: one wavefront for each of the two lines of a row.
    beyond = num_blocks * keys - 2048
    found -= 256 * 2 * beyond * (k.wavefronts - k.ideal) // keys
    assert found == counted


def test_lines_and_sectors_of_a_copy() -> None:
    def wavefronts(targets: list[int]) -> int:
        lanes = tuple(enumerate(targets))
        phase = CopyPhase(16, lanes, tuple(range(0, 128, 16)))
        assert sorted(lane for turn in phase.wavefront_words for lane in turn) == [
            (thread, word) for thread, target in lanes for word in range(target, target + 16, 4)
        ]
        return phase.wavefronts

    line = list(range(0, 128, 16))
    assert wavefronts(line) == 1
    # A swizzle permutes chunks within sectors, and sectors within the line.
    assert wavefronts([target ^ 48 for target in line]) == 1
    # Shifted by sectors, the line straddles two lines. Shifted by half a sector, every sector straddles two as well.
    found = [wavefronts([target + 16 * by for target in line]) for by in range(9)]
    assert found == [1, 3, 2, 4, 2, 4, 2, 3, 1]


@deterministic
@given(st.sampled_from([4, 8, 16]), st.lists(st.integers(0, 255), min_size=1, max_size=32))
def test_a_phase_takes_as_many_wavefronts_as_serving_it(width: int, places: list[int]) -> None:
    lanes = tuple((thread, place * width) for thread, place in enumerate(places[: 128 // width]))
    assert Phase(width, lanes).wavefronts == serve([address for _, address in lanes], width)


def test_idle_lanes_take_no_wavefronts() -> None:
    tile = SmemTile(64, 64, variant="plain")
    coords = [(lane, 0) if lane in (0, 3, 9) else None for lane in range(32)]
    access = warp_access(layout_of(tile), coords)
    assert [phase.lanes for phase in access.phases] == [((0, 0), (3, 3 * 128)), ((9, 9 * 128),)]
    assert access.wavefronts == 3


def test_order_of_the_matrices() -> None:
    """In (row, chunk) of a plain 32 x 32: a0 to a3 go down first, two pairs b0 b1 along the columns first."""
    tile = SmemTile(32, 32, variant="plain")

    def spots(access) -> list[tuple[int, int]]:
        return [(phase.lanes[0][1] // 64, phase.lanes[0][1] % 64 // 16) for phase in access.phases]

    assert spots(ldmatrix_a(layout_of(tile), 16, 16)) == [(16, 2), (24, 2), (16, 3), (24, 3)]
    assert spots(ldmatrix_b(layout_of(tile), 16, 16)) == [(16, 2), (16, 3), (24, 2), (24, 3)]
    assert spots(ldmatrix_v(transposed(tile), 16, 16)) == [(16, 2), (24, 2), (16, 3), (24, 3)]


def test_v_is_addressed_by_key() -> None:
    tile = SmemTile(64, 128)
    lanes = [lane for phase in ldmatrix_v(transposed(tile), 32, 48).phases for lane in phase.lanes]
    assert lanes == [(t, 2 * layout_of(tile)(48 + t % 16, 32 + t // 16 * 8)) for t in range(32)]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ACCESSES)
def test_each_access_touches_the_tile_once(name: str, variant: str) -> None:
    tile = SmemTile(48, 96, variant=variant)
    touched = [
        address + byte
        for phase in ACCESSES[name](tile).phases
        for _, address in phase.lanes
        for byte in range(0, phase.width, 2)
    ]
    elements = [2 * layout_of(tile)(row, col) for row in range(48) for col in range(96)]
    assert sorted(touched) == sorted(elements)


@pytest.mark.parametrize("num_threads", [32, 128, 384])
def test_copies_use_their_threads(num_threads: int) -> None:
    # 384 threads cover 48 rows: a second pass has only 16 rows left, and the other threads are idle.
    for access in (cp_async_write(SmemTile(64, 64), num_threads), load_rows(SmemTile(64, 64), num_threads)):
        assert {thread for phase in access.phases for thread, _ in phase.lanes} == set(range(num_threads))
        assert (access.wavefronts, access.conflicts) == (64, 0)


@pytest.mark.parametrize("element_bytes", [1, 4])
def test_copies_of_other_elements(element_bytes: int) -> None:
    for variant in VARIANTS:
        tile = SmemTile(64, 128 // element_bytes, element_bytes, variant)
        assert (load_rows(tile).wavefronts, load_rows(tile).conflicts) == (64, 0)
        assert cp_async_write(tile).wavefronts == (168 if variant == "padded" else 64)


def test_fragments_belong_to_their_warps() -> None:
    tile = SmemTile(64, 64, variant="plain")
    for phase in store_fragment(tile, num_warps=4).phases:
        assert {thread // 32 for thread, _ in phase.lanes} == {address // 128 // 16 for _, address in phase.lanes}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ldmatrix_a(layout_of(SmemTile(64, 64)), 56, 0), r"16 bytes from \(64, 0\) leave the layout"),
        (lambda: ldmatrix_a(layout_of(SmemTile(64, 64)), 0, 60), r"leave the layout"),
        (lambda: ldmatrix_b(layout_of(SmemTile(64, 64)), -8, 0), r"leave the layout"),
        (
            lambda: ldmatrix_a(layout_of(SmemTile(64, 64)), 0, 4),
            r"does not hold 16 aligned contiguous bytes at \(0, 4\)",
        ),
        # The ends of a chunk are contiguous, its middle is not.
        (lambda: ldmatrix_a(Layout((16, (2, 2, 8)), (32, (2, 1, 4))), 0, 0), "does not hold 16 aligned"),
        # Without the transposed view, columns of keys would be read.
        (lambda: ldmatrix_v(layout_of(SmemTile(64, 64)), 0, 0), "does not hold 16 aligned"),
        (lambda: warp_access(layout_of(SmemTile(64, 64)), [(0, 0)] * 31), "31 coordinates"),
        (lambda: Vector(12), "width=12: a lane touches 4, 8 or 16 bytes"),
        (lambda: Vector(4, 8), "element_bytes=8: must divide width=4"),
        (lambda: Vector(4, along=2), "along=2"),
        (lambda: cp_async_write(SmemTile(64, 64), 100), "num_threads=100: must be a positive multiple of 32"),
        (lambda: store_fragment(SmemTile(64, 64), 3), "num_warps=3: 16 rows per warp must divide rows=64"),
        (lambda: store_fragment(SmemTile(64, 64, 4)), "element_bytes=4"),
        (lambda: tile_report(SmemTile(8, 64)), "rows=8: the mma.m16n8k16 accesses need a multiple of 16"),
    ],
)
def test_rejects(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
