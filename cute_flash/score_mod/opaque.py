"""`bound.bind_mods` for torch.compile, which must call it instead of tracing it.

It is a separate module because `torch.compiler.disable` imports torch._dynamo, which takes seconds.
"""

from __future__ import annotations

import torch

from cute_flash.score_mod import bound

bind_mods = torch.compiler.disable(bound.bind_mods)
