"""The plugin of vLLM (entry point `vllm.general_plugins`): it registers the backend by name, without importing it."""

from __future__ import annotations

NAME = "CUTE_FLASH"


def register() -> None:
    """Register the attention backend CUTE_FLASH. vLLM calls this in each process; repeated calls have no effect.

    Example:
        >>> from cute_flash.integrations.vllm_plugin import register
        >>> register()  # doctest: +SKIP
        >>> llm = vllm.LLM(path, attention_backend="CUTE_FLASH")  # doctest: +SKIP
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, "cute_flash.integrations.vllm.Backend")
