"""The numbers of docs/playground are those of `layouts` and `cute_flash`; headless Chromium runs its functions."""

from __future__ import annotations

import contextlib
import html
import io
import json
import os
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_flash import BlockMask, masks
from cute_flash.score_mod.block_mask import EMPTY, FULL, PARTIAL, visible_pairs
from cute_flash.score_mod.trace import bind
from cute_flash.smem.tile import VARIANTS
from layouts import ACCESSES, ComposedLayout, Layout, SmemTile, Swizzle, Vector, layout_of, tile_to_shape, warp_access
from layouts.banks import NUM_BANKS, WARP, Access, join

pytestmark = pytest.mark.processes

FOLDER = Path(__file__).parents[2] / "docs" / "playground"
PAGE = FOLDER / "standalone.html"
SCRIPTS = ("banks.js", "masks.js", "draw.js", "page.js")
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
INSTALL = "no Chromium found: apt-get install chromium-headless-shell"
Settings = dict[str, Any]


# ---- the browser


def dump(url: str, profile: Path) -> str:
    """The document of a page after its scripts ran."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None and os.environ.get("CI"):
        pytest.fail(INSTALL)
    if browser is None:
        pytest.skip(INSTALL)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--window-size=1280,900"]
    command = [browser, *flags, "--virtual-time-budget=10000", "--dump-dom", url]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def evaluate(expression: str, tmp_path: Path, **values: Any) -> Any:
    """The value of an expression of JavaScript that may use the page's functions and the given values."""
    scripts = "".join(f'<script src="{(FOLDER / name).as_uri()}"></script>' for name in SCRIPTS)
    page = tmp_path / "evaluate.html"
    page.write_text(f"""<!doctype html><meta charset="utf-8"><pre id="result"></pre>
        <div id="playground-banks"></div><div id="playground-masks"></div>
        <script>
        const given = {json.dumps(values)};
        const show = (text) => {{ document.getElementById("result").textContent = text; }};
        addEventListener("error", (event) => show(JSON.stringify({{failed: event.message}})));
        addEventListener("load", () => show(JSON.stringify({expression})));
        </script>{scripts}""")
    (text,) = re.findall(r'<pre id="result">(.*?)</pre>', dump(page.as_uri(), tmp_path / "profile"), re.DOTALL)
    result = json.loads(html.unescape(text))
    assert "failed" not in result, result
    return result


def run_python(code: str) -> dict[str, Any]:
    """The names that a snippet of the page defines."""
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(code, names)
    return names


# ---- banks


def random_tile(rng: random.Random) -> Settings:
    element_bytes, layout = rng.choice([1, 2, 4]), rng.choice(["plain", "padded", "swizzled"])
    chunk = 16 // element_bytes
    # Also sizes and swizzles that do not keep 16 bytes together: both sides must refuse them.
    is_aligned = rng.random() < 0.85
    settings = {
        "rows": rng.choice([8, 16, 24, 32, 48, 64]) if is_aligned else rng.randrange(1, 50),
        "cols": chunk * rng.choice([1, 2, 4, 6, 8, 12, 16]) if is_aligned else rng.randrange(4, 70),
        "bytes": element_bytes,
        "layout": layout,
        "pad": chunk * rng.randrange(3) if is_aligned else rng.randrange(12),
        "atom": rng.choice([0, 0, 16, 32, 64]),
        "B": rng.randrange(5),
        "M": (chunk.bit_length() - 1) + rng.randrange(2) if is_aligned else rng.randrange(5),
        "S": rng.choice([3, 3, 4, 5, 2]),
        "access": rng.choice(["ldmatrix", "row", "column"]),
        "width": rng.choice([4, 8, 16]),
    }
    return settings | {"instruction": rng.randrange(len(instructions(settings)))}


def layout_in_python(settings: Settings) -> Layout | ComposedLayout:
    rows, cols = settings["rows"], settings["cols"]
    if settings["layout"] != "swizzled":
        padding = settings["pad"] if settings["layout"] == "padded" else 0
        return Layout((rows, cols), (cols + padding, 1))
    swizzle = Swizzle(settings["B"], settings["M"], settings["S"])
    atom = settings["atom"]
    if not atom:
        return ComposedLayout(swizzle, 0, Layout((rows, cols), (cols, 1)))
    return tile_to_shape(ComposedLayout(swizzle, 0, Layout((8, atom), (atom, 1))), (rows, cols))


def instructions(settings: Settings) -> list[list[tuple[int, int] | None]]:
    """The elements that the lanes of each instruction read, in the order of the page."""
    rows, cols, access = settings["rows"], settings["cols"], settings["access"]
    length = (16 if access == "ldmatrix" else settings["width"]) // settings["bytes"]
    starts = range(0, cols, length)
    if access == "row":
        vectors = [(row, col) for row in range(rows) for col in starts]
        warps = [vectors[i : i + WARP] for i in range(0, len(vectors), WARP)]
        return [[*warp, *[None] * (WARP - len(warp))] for warp in warps]
    if access == "column":
        spots = [[(row0 + lane, col) for lane in range(WARP)] for row0 in range(0, rows, WARP) for col in starts]
    else:
        # As layouts.ldmatrix_b, for elements of any size.
        spots = [
            [(row0 + lane // 16 * 8 + lane % 8, col0 + lane // 8 % 2 * length) for lane in range(WARP)]
            for row0 in range(0, rows, 16)
            for col0 in starts[::2]
        ]
    return [[(row, col) if row < rows and col < cols else None for row, col in warp] for warp in spots]


def counts(access: Access) -> dict[str, int]:
    return {"wavefronts": access.wavefronts, "ideal": access.ideal, "conflicts": access.conflicts}


def banks_in_python(settings: Settings) -> Settings:
    """The expected result of `playgroundBanks.analyze`."""
    try:
        layout = layout_in_python(settings)
        width = 16 if settings["access"] == "ldmatrix" else settings["width"]
        warps = instructions(settings)
        accesses = [warp_access(layout, coords, Vector(width, settings["bytes"])) for coords in warps]
    except ValueError:
        return {"error": True}
    chosen = accesses[settings["instruction"]]
    phases = []
    for phase in chosen.phases:
        words = [len({word for _, word in phase.banks.get(bank, ())}) for bank in range(NUM_BANKS)]
        served = [[list(pair) for pair in turn] for turn in phase.wavefront_words]
        lanes = [list(lane) for lane in phase.lanes]
        phases.append({"lanes": lanes, "counts": words, "wavefronts": phase.wavefronts, "served": served})
    coords = [coord and list(coord) for coord in warps[settings["instruction"]]]
    whole = join(accesses)
    return {
        "layout": str(layout),
        "bytes": layout.cosize * settings["bytes"],
        "instruction": {"coords": coords, "phases": phases, **counts(chosen)},
        "tile": {"instructions": len(accesses), **counts(whole)},
    }


def test_banks_are_those_of_layouts(tmp_path: Path) -> None:
    rng = random.Random(20)
    settings = [random_tile(rng) for _ in range(120)]
    found = evaluate(
        "given.settings.concat(playgroundPresets.banks).map((settings) => "
        "({settings, result: playgroundBanks.analyze(settings), python: playgroundBanks.pythonOf(settings)}))",
        tmp_path,
        settings=settings,
    )
    assert len(found) >= len(settings) + 5
    num_errors = 0
    for one in found:
        result, expected = one["result"], banks_in_python(one["settings"])
        if "error" in result:
            num_errors += 1
            result = {"error": True}
        else:
            access = run_python(one["python"])["access"]
            assert counts(access).items() <= expected["instruction"].items(), one["settings"]
        assert result == expected, one["settings"]
    assert 5 <= num_errors <= len(found) - 50


def test_presets_are_tiles_of_the_kernels(tmp_path: Path) -> None:
    """The presets of FA2's K tile are the layouts of `SmemTile`, read as the kernels read K."""
    presets = evaluate("playgroundPresets.banks.map(playgroundBanks.analyze)", tmp_path)
    for variant in VARIANTS:
        tile = SmemTile(64, 128, variant=variant)
        (found,) = [preset for preset in presets if preset["layout"] == str(layout_of(tile))]
        whole = ACCESSES["ldmatrix_b"](tile)
        assert found["bytes"] == tile.bytes
        assert found["tile"] == {"instructions": whole.instructions, **counts(whole)}


def test_the_element_under_the_pointer_is_read_by_its_instruction(tmp_path: Path) -> None:
    rng = random.Random(21)
    settings = [random_tile(rng) for _ in range(40)]
    found = evaluate(
        "given.settings.map((s) => Array.from({length: s.rows}, (_, row) => "
        "Array.from({length: s.cols}, (_, col) => playgroundBanks.instructionAt(s, row, col))))",
        tmp_path,
        settings=settings,
    )
    for one, indices in zip(settings, found, strict=True):
        length = (16 if one["access"] == "ldmatrix" else one["width"]) // one["bytes"]
        warps = [set(warp) for warp in instructions(one)]
        for row, of_row in enumerate(indices):
            for col, index in enumerate(of_row):
                assert (row, col - col % length) in warps[index], (one, row, col)


# ---- masks


def random_mask(rng: random.Random) -> Settings:
    sq, sk = rng.randrange(1, 200), rng.randrange(1, 200)
    if rng.random() < 0.5:
        sq = sk

    def side() -> int | None:
        return rng.choice([None, None, 0, rng.randrange(sk + 1)])

    return {
        "sq": sq,
        "sk": sk,
        "mask": rng.choice(["full", "causal", "prefix"]),
        "prefix": rng.randrange(sk + 10),
        "left": side(),
        "right": side(),
        "documents": [rng.randrange(90) for _ in range(rng.choice([0, 0, 1, 3, 5]))],
        "tileM": rng.choice([1, 7, 8, 16, 32, 128]),
        "tileN": rng.choice([1, 7, 8, 16, 32, 128]),
    }


def masks_in_python(settings: Settings) -> Settings:
    """The expected result of `playgroundMasks.analyze`."""
    parts = []
    if settings["documents"]:
        offsets = torch.tensor([0, *settings["documents"]]).cumsum(0)
        parts.append(masks.document(offsets=offsets))
    if settings["mask"] == "prefix":
        parts.append(masks.prefix_lm(settings["prefix"]))
    mask_mod = masks.and_(*parts) if parts else None
    sq, sk, tile = settings["sq"], settings["sk"], (settings["tileM"], settings["tileN"])
    window, causal = (settings["left"], settings["right"]), settings["mask"] == "causal"
    block_mask = BlockMask.of(mask_mod, (1, 1, sq, sk), tile=tile, causal=causal, window=window)
    status = block_mask.status[0, 0]
    rows, keys = torch.arange(sq), torch.arange(sk)
    bound = None if mask_mod is None else bind(mask_mod, "mask_mod")
    visible = sum(
        int(visible_pairs(bound, block_mask.window, some, keys, (sq, sk), (0, 0)).sum()) for some in rows.split(256)
    )
    return {
        "status": status.tolist(),
        "blocks": status.numel(),
        "empty": int((status == EMPTY).sum()),
        "partial": int((status == PARTIAL).sum()),
        "full": int((status == FULL).sum()),
        "density": block_mask.density,
        "saved": 1 - block_mask.density,
        "visible": visible,
        "pairs": sq * sk,
    }


def test_masks_are_those_of_block_masks(tmp_path: Path) -> None:
    rng = random.Random(22)
    settings = [random_mask(rng) for _ in range(120)]
    found = evaluate(
        "given.settings.concat(playgroundPresets.masks).map((settings) => "
        "({settings, result: playgroundMasks.analyze(settings), python: playgroundMasks.pythonOf(settings)}))",
        tmp_path,
        settings=settings,
    )
    assert len(found) >= len(settings) + 5
    kinds = set()
    for one in found:
        expected = masks_in_python(one["settings"])
        assert one["result"] == expected, one["settings"]
        snippet = run_python(one["python"])["block_mask"]
        assert snippet.status[0, 0].tolist() == expected["status"], one["settings"]
        kinds |= {kind for row in expected["status"] for kind in row}
    assert kinds == {EMPTY, PARTIAL, FULL}


# ---- the page


def shown_numbers(document: str) -> dict[str, str]:
    return dict(re.findall(r'<dd data-value="(\w+)">(.*?)</dd>', document))


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page with settings in its address."""
    tile = "banks.layout=padded&banks.pad=4&banks.bytes=4&banks.cols=32&banks.instruction=3"
    return dump(f"{PAGE.as_uri()}#{tile}&masks.documents=700,1348", tmp_path_factory.mktemp("profile"))


def test_page_shows_the_settings_of_its_address(document: str) -> None:
    tile = {"rows": 64, "cols": 32, "bytes": 4, "layout": "padded", "pad": 4, "access": "ldmatrix", "instruction": 3}
    of_banks = banks_in_python(tile)
    of_masks = masks_in_python({
        "sq": 2048, "sk": 2048, "mask": "causal", "left": None, "right": None, "documents": [700, 1348],
        "tileM": 128, "tileN": 128,
    })  # fmt: skip
    shown = shown_numbers(document)
    for name in ("wavefronts", "ideal", "conflicts"):
        assert shown[name] == f"{of_banks['instruction'][name]:,}"
    assert shown["tile"] == f"{of_banks['tile']['conflicts']:,}"
    assert shown["bytes"] == f"{of_banks['bytes']:,} B"
    for name in ("full", "partial", "empty"):
        assert shown[name] == f"{of_masks[name]:,}"
    assert shown["density"] == f"{of_masks['density']:.1%}".replace("%", " %")
    assert shown["visible"] == f"{of_masks['visible'] / of_masks['pairs']:.1%}".replace("%", " %")


def test_link_keeps_the_settings(document: str) -> None:
    links = [html.unescape(link) for link in re.findall(r'class="pg-link" href="#(.*?)"', document)]
    assert len(links) == 2
    for link, panel in zip(links, ("banks", "masks"), strict=True):
        assert f"panel={panel}" in link
        for setting in ("banks.layout=padded", "banks.pad=4", "banks.instruction=3", "masks.documents=700,1348"):
            assert setting in link.split("&")


def test_controls_have_labels_and_help(document: str) -> None:
    names = re.findall(r'<(?:input|select) id="([\w-]+)"', document)
    assert len(names) >= 20
    for name in names:
        assert f'<label for="{name}">' in document
        assert re.search(rf'<small id="{name}-help">[A-Z].*?\.</small>', document), f"{name} has no help"


def test_controls_change_the_numbers(tmp_path: Path) -> None:
    """A select, a number, a preset and a click on the tile, as a user would; the address follows."""
    step = """
        const shown = () => Object.fromEntries(
            [...document.querySelectorAll("dd")].map((x) => [x.dataset.value, x.textContent]));
        const type = (id, value) => {
            const input = document.getElementById(id);
            input.value = value;
            input.dispatchEvent(new Event("input", {bubbles: true}));
        };
        const press = (name) => [...document.querySelectorAll("button")].find((x) => x.textContent === name).click();
        const canvas = document.querySelector("#playground-banks canvas");
        const steps = [shown()];
        type("pg-banks-layout", "swizzled"); steps.push(shown());
        press("padded"); steps.push(shown());
        type("pg-masks-left", "127"); steps.push(shown());
        const {right, bottom} = canvas.getBoundingClientRect();
        const at = {clientX: right - 20, clientY: bottom - 20};
        canvas.dispatchEvent(new MouseEvent("click", at));
        return {steps, hash: location.hash, slider: document.getElementById("pg-banks-instruction").value};
    """
    found = evaluate(f"(() => {{{step}}})()", tmp_path)
    assert [one["conflicts"] for one in found["steps"]] == ["28", "0", "0", "0"]
    assert [one["bytes"] for one in found["steps"]] == ["16,384 B", "16,384 B", "17,392 B", "17,392 B"]
    # A window of one block beside the diagonal: 15 + 16 blocks, all partial.
    assert [one["partial"] for one in found["steps"]] == ["16", "16", "16", "31"]
    # The last 16 x 16 block of the first 16 rows.
    assert found["slider"] == "7"
    for setting in ("banks.layout=padded", "banks.instruction=7", "masks.left=127"):
        assert setting in found["hash"]


def test_site_page_is_the_standalone_page() -> None:
    """Both load the same files into the same elements."""
    site, alone = (FOLDER.parent / "playground.md").read_text(), PAGE.read_text()
    for name in ('src="{}playground.js"', 'href="{}playground.css"'):
        assert name.format("playground/") in site and name.format("") in alone
    for panel in ("playground-banks", "playground-masks"):
        assert f'<div id="{panel}"></div>' in site and f'<div id="{panel}"></div>' in alone
    assert json.loads(re.findall(r"of (\[.*?\])", (FOLDER / "playground.js").read_text())[0]) == [*SCRIPTS]
