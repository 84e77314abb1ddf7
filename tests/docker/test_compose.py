"""compose.yaml, docker/Dockerfile and .dockerignore agree with each other and with the repository. Needs no Docker.

`docker compose config` would find a wrong key, but not a removed command, a moved folder, or an image tag of an old
version.
"""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import subprocess
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from cute_flash.jit import disk
from cute_flash.spec.arch import ARCHS
from cute_flash.tools import cli
from cute_flash.version import __version__
from profiling import __main__ as profiling_cli
from profiling.documents.doc_speed import RUNS
from profiling.documents.sources import read
from tests.docs.test_commands import check

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
NEED_GPU = {"bench", "profile", "gpu-test"}

BUILD_KEYS = {"context", "dockerfile", "target", "args"}
DEVICE_KEYS = {"driver", "count", "device_ids", "capabilities", "options"}


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, arguments) of a Dockerfile, with continued lines joined and comments removed."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    found = [line.partition(" ") for line in joined.splitlines() if line.strip()]
    return [(name.upper(), rest.strip()) for name, _, rest in found]


DOCKERFILE = instructions((ROOT / "docker" / "Dockerfile").read_text())
ARGS = dict(rest.partition("=")[::2] for name, rest in DOCKERFILE if name == "ARG")
# A build argument in the text is replaced by its default.
ENV = {
    key: re.sub(r"\$\{(\w+)\}", lambda match: ARGS.get(match[1], match[0]), value)
    for name, rest in DOCKERFILE
    if name == "ENV"
    for key, _, value in (pair.partition("=") for pair in shlex.split(rest))
}


def only(name: str) -> str:
    """The arguments of an instruction that occurs once."""
    (found,) = [rest for instruction, rest in DOCKERFILE if instruction == name]
    return found


WORKDIR = PurePosixPath(only("WORKDIR"))


def mounts(service: dict[str, Any]) -> list[tuple[str, PurePosixPath]]:
    """(named volume or ./folder, path in the container) of each mount."""
    parts = [text.split(":") for text in service.get("volumes", [])]
    assert all(len(part) == 2 for part in parts), parts
    return [(source, PurePosixPath(target)) for source, target in parts]


# The compose file, by the rules of its specification


def test_the_services_of_the_readme() -> None:
    assert set(SERVICES) == {"demo", "test", "gpu-test", "bench", "profile"}
    text = (ROOT / "docker" / "README.md").read_text()
    for name in SERVICES:
        assert re.search(rf"docker compose run --rm {name}\b", text), name


@pytest.mark.parametrize("name", SERVICES)
def test_named_volumes_are_declared_and_folders_exist(name: str) -> None:
    for source, target in mounts(SERVICES[name]):
        assert target.is_absolute()
        if source.startswith("."):
            assert (ROOT / source).is_dir()
            # Git tracks no empty folder, and Docker would create a missing folder as root.
            assert is_checked_in(source), source
            assert ROOT / source == ROOT / target.relative_to(WORKDIR)
        else:
            assert source in COMPOSE["volumes"]
    declared = {source for service in SERVICES.values() for source, _ in mounts(service)}
    assert set(COMPOSE["volumes"]) <= declared


def is_checked_in(folder: str) -> bool:
    """Whether git tracks a file of this folder; without git, as in the image, whether it has any file."""
    command = ["git", "ls-files", folder]
    try:
        return bool(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
    except (OSError, subprocess.CalledProcessError):
        return any((ROOT / folder).iterdir())


@pytest.mark.parametrize("name", SERVICES)
def test_gpus_are_reserved_where_they_are_needed(name: str) -> None:
    deploy = SERVICES[name].get("deploy")
    assert (deploy is not None) == (name in NEED_GPU)
    if deploy is not None:
        (device,) = deploy["resources"]["reservations"]["devices"]
        assert set(device) <= DEVICE_KEYS and "capabilities" in device
        assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"]
        # The specification allows one of the two.
        assert ("count" in device) != ("device_ids" in device)


# The image


def test_two_images_tagged_with_the_version() -> None:
    """Those that need a GPU have a pack of kernels, which takes minutes to build."""
    for name, service in SERVICES.items():
        tag = f"cute-flash:${{CUTE_FLASH_VERSION:-{__version__}}}"
        assert service["image"] == (f"{tag}-kernels" if name in NEED_GPU else tag)
        assert service["build"] == SERVICES["bench" if name in NEED_GPU else "demo"]["build"]


def test_the_build_and_its_arguments_exist() -> None:
    stages = [rest.split() for name, rest in DOCKERFILE if name == "FROM"]
    assert stages == [["${BASE_IMAGE}", "AS", "source"], ["source", "AS", "kernels"]]
    of_kernels = {name for name in ARGS if name.startswith("KERNEL_")}
    for service, target, names in (("demo", "source", set(ARGS) - of_kernels), ("bench", "kernels", set(ARGS))):
        build = SERVICES[service]["build"]
        assert set(build) == BUILD_KEYS and build["target"] == target
        context = ROOT / build["context"]
        assert context == ROOT and (context / build["dockerfile"]).is_file()
        assert set(build["args"]) == names
        # Null: the value is taken from the environment, else the Dockerfile's default applies.
        assert set(build["args"].values()) == {None}


def test_the_pack_of_the_image_is_one_that_the_command_builds() -> None:
    (made,) = (rest for name, rest in DOCKERFILE if name == "RUN" and "cute-flash pack" in rest)
    line = re.search(r"cute-flash pack .*?(?=&&)", made)[0]
    words = [re.sub(r"\$\{(\w+)\}", lambda match: ARGS[match[1]], word) for word in shlex.split(line)]
    check(words)
    args = cli._parser().parse_args(words[1:])
    assert all(name in ARCHS for name in args.arch)
    assert f"target={args.work}," in made and f"pip install --no-cache-dir --no-deps {args.out}/*.whl" in made


def test_user_is_not_root_and_owns_the_cache() -> None:
    users = [rest for name, rest in DOCKERFILE if name == "USER"]
    # The stage `kernels` installs the pack as root.
    assert users == ["flash", "root", "flash"]
    assert DOCKERFILE[-1] == ("USER", "flash")
    stage = DOCKERFILE.index(("FROM", "source AS kernels"))
    assert DOCKERFILE[stage - 2 : stage] == [("USER", "flash"), ("CMD", only("CMD"))]
    assert int(ARGS["USER_ID"]) > 0
    made = " ".join(rest for name, rest in DOCKERFILE if name == "RUN")
    assert f"install -d -o flash -g flash -m 700 /home/flash/.cache {ENV['CUTE_FLASH_CACHE_DIR']}" in made


def test_the_cache_volume_is_the_kernel_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (variable,) = (key for key in ENV if key.startswith("CUTE_FLASH_"))
    monkeypatch.setenv(variable, str(tmp_path / "here"))
    assert disk.DiskCache.default().folder == tmp_path / "here"
    for service in SERVICES.values():
        assert ("kernels", PurePosixPath(ENV[variable])) in mounts(service)


def test_only_the_profiler_has_a_capability_and_hands_it_to_the_user() -> None:
    others = [service for name, service in SERVICES.items() if name != "profile"]
    assert not any({"cap_add", "user", "entrypoint"} & set(service) for service in others)
    profile = SERVICES["profile"]
    assert profile["cap_add"] == ["SYS_ADMIN"] and profile["user"] == "root"
    # The container starts as root, then switches to the image's user.
    program, *options = profile["entrypoint"]
    assert program == "setpriv" and options[-1] == "--"
    assert {"--reuid=flash", "--regid=flash", "--init-groups", "--ambient-caps=+sys_admin"} <= set(options)
    assert profile["environment"]["HOME"] == "/home/flash"


# Files in the image


def ignored(path: str) -> bool:
    """Whether .dockerignore excludes a path of the repository; handles the patterns that it uses."""
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert not any(pattern.startswith("!") for pattern in patterns)
    parts = PurePosixPath(path).parts
    return any(
        fnmatch.fnmatch(part, pattern.removeprefix("**/"))
        for pattern in patterns
        for part in (parts if pattern.startswith("**/") else parts[:1])
    )


def test_copied_files_exist_and_are_not_ignored() -> None:
    copies = [shlex.split(rest) for name, rest in DOCKERFILE if name in ("COPY", "ADD")]
    for copy in copies:
        *sources, target = (word for word in copy if not word.startswith("--"))
        assert sources and not target.startswith("/")
        for source in sources:
            assert (ROOT / source).exists() and not ignored(source), source


def test_the_image_has_the_source_and_no_build_outputs() -> None:
    for path in (".git", "cute_flash/__pycache__", "tests/gpu/a.pyc"):
        assert ignored(path), path
    for pattern in (ROOT / ".gitignore").read_text().split():
        assert ignored(pattern.rstrip("/").replace("*", "a").replace("[cod]", "c")), pattern
    for path in ("cute_flash", "layouts", "profiling", "tests", "docker", "compose.yaml", ".gitignore"):
        assert not ignored(path), path


# The commands


@pytest.mark.parametrize("name", SERVICES)
def test_commands_are_accepted(name: str) -> None:
    check(SERVICES[name]["command"])


def test_the_default_command_is_accepted() -> None:
    check(json.loads(only("CMD")))


def output_of(name: str) -> PurePosixPath:
    """The folder that the command of a service writes to: its --out, or the default."""
    _python, _m, _profiling, *arguments = SERVICES[name]["command"]
    return WORKDIR / str(profiling_cli._parser().parse_args(arguments).out)


@pytest.mark.parametrize(("name", "folder"), [("bench", "profiling/results"), ("profile", "profiling/reports")])
def test_results_are_written_to_a_mounted_folder(name: str, folder: str) -> None:
    mounted = [target for source, target in mounts(SERVICES[name]) if source.startswith("./")]
    assert mounted == [WORKDIR / folder]
    assert any(target in output_of(name).parents for target in mounted), output_of(name)


def test_the_readme_names_the_versions_of_the_image_and_of_the_published_runs() -> None:
    text = (ROOT / "docker" / "README.md").read_text()
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    rows = dict(re.findall(r"^\| (torch|nvidia-cutlass-dsl|FlashAttention-\d) \| (.*) \|$", text, re.MULTILINE))
    for package in ("torch", "nvidia-cutlass-dsl"):
        assert rows[package].partition(" | ")[0] == pins[package], package
    for run in map(read, RUNS.values()):
        machine = run.machine
        assert machine["torch"] in rows["torch"] and machine["cutlass_dsl"] in rows["nvidia-cutlass-dsl"]
        major, minor = divmod(machine["cudnn"], 10_000)
        assert f"cuDNN {major}.{minor // 100}.{minor % 100}" in rows["torch"]
        if "fa4" in run.peers:
            assert machine["flash_attn_4"] in rows["FlashAttention-4"]
    # Peers are not dependencies, so the image contains none.
    assert not any(name.startswith("flash") for name in pins)
