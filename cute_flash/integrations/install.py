"""`install_as_flash_attn`: make the adapters importable under the module names of flash-attn."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

from cute_flash.integrations import bert_padding, flash_attn

PACKAGE = "flash_attn"
# The adapters have the signatures of this version of flash-attn.
VERSION = "2.8.4"
FUNCTIONS = (
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache",
)  # fmt: skip
PADDING = ("index_first_axis", "index_put_first_axis", "pad_input", "unpad_input")


def install_as_flash_attn(*, replace: bool = False, metadata: bool = False) -> None:
    """Make `import flash_attn` import the adapters of cute_flash in this process.

    The call puts `flash_attn`, `flash_attn.flash_attn_interface` and `flash_attn.bert_padding` into `sys.modules`. Call
    it before other packages import flash_attn: names that they already imported do not change. A second call has no
    effect. To undo it, delete the three names from `sys.modules`.

    Args:
        replace: Also replace a flash_attn that is installed or imported. Its modules are removed from `sys.modules`.
        metadata: Also make `importlib.metadata` find the distribution flash-attn 2.8.4. transformers needs it for
            `attn_implementation="flash_attention_2"`. Call before transformers is imported. Some packages, such as
            Transformer Engine, call private functions of flash-attn when they find its metadata, and then fail.

    Raises:
        ValueError: Another flash_attn is installed, and `replace` is False.

    Examples:
        >>> import sys, cute_flash
        >>> cute_flash.install_as_flash_attn()
        >>> from flash_attn import __version__, flash_attn_func
        >>> __version__
        '2.8.4'
        >>> for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        ...     del sys.modules[name]
    """
    if getattr(sys.modules.get(PACKAGE), "flash_attn_func", None) is not flash_attn.flash_attn_func:
        _install(replace)
    if metadata:
        sys.modules[PACKAGE]._distribution = _Distribution()  # type: ignore[attr-defined]
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.append(_Finder())


def _install(replace: bool) -> None:
    if not replace and (PACKAGE in sys.modules or find_spec(PACKAGE) is not None):
        raise ValueError("another flash_attn is installed: pass replace=True to use cute_flash in its place")
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]
    package = _module(PACKAGE, flash_attn, FUNCTIONS, is_package=True)
    package.__version__ = VERSION  # type: ignore[attr-defined]
    for name, source, names in (
        ("flash_attn_interface", flash_attn, FUNCTIONS),
        ("bert_padding", bert_padding, PADDING),
    ):
        setattr(package, name, _module(f"{PACKAGE}.{name}", source, names))


class _Finder(DistributionFinder):
    """Finds the metadata of flash-attn while `sys.modules` holds adapters that were installed with metadata."""

    def find_spec(self, *args: Any) -> None:
        return None

    def find_distributions(self, context: Any = DistributionFinder.Context()) -> Iterator[Distribution]:  # noqa: B008
        distribution = getattr(sys.modules.get(PACKAGE), "_distribution", None)
        if distribution is not None and (context.name or PACKAGE).replace("-", "_").lower() == PACKAGE:
            yield distribution


class _Distribution(Distribution):
    def read_text(self, filename: str) -> str | None:
        texts = {"METADATA": f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {VERSION}\n", "top_level.txt": PACKAGE}
        return texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: cute_flash installs flash_attn in this process only, without files")


def _module(name: str, source: ModuleType, names: tuple[str, ...], is_package: bool = False) -> ModuleType:
    """A module with functions of the source, in `sys.modules`, with a spec for `importlib.util.find_spec`."""
    module = module_from_spec(ModuleSpec(name, None, origin=source.__file__, is_package=is_package))
    module.__doc__ = source.__doc__
    for function in names:
        setattr(module, function, getattr(source, function))
    sys.modules[name] = module
    return module
