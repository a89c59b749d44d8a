"""The hooks of a patched base model: they read each pass, and check it before and after."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ..positions.requests import current
from ..positions.tables import refuse_trace
from . import families
from .cache_guard import CacheGuard
from .layers import spec_text
from .parts import Parts
from .passes import PASS, Pass
from .replaced_code import ReplacedForwardCheck
from .rotary_check import LiveCheck
from .sequences import measures_tokens, note_shifts, read_sequences


class PassHooks:
    """Reads each pass through a base model, and checks it before and after."""

    def __init__(self, base: nn.Module, live: LiveCheck, parts: Parts) -> None:
        self.names = families.argument_names(base)
        self.live, self.spec = live, spec_text(live.spec)
        self.forwards = ReplacedForwardCheck(base)
        self.absolute = parts.absolute
        self.follows_length = any(part.follows_length for part in parts.cache_parts)
        scores = [layer.score for layer in parts.layers if layer.score is not None]
        self.counting = next((x.encoding for x in scores if measures_tokens(x.encoding)), None)
        self.reads_positions = any(score.reads_positions for score in scores)
        self.cuts_logits = "logits_to_keep" in self.names
        self.guard = CacheGuard.of(live.spec, parts.cache_parts)

    def attach(self, base: nn.Module) -> list[RemovableHandle]:
        # The first of all hooks, because others may read the positions that it finds.
        before = base.register_forward_pre_hook(self.before, with_kwargs=True, prepend=True)
        return [before, base.register_forward_hook(self.after, with_kwargs=True)]

    def before(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        pass_ = Pass(self.names, args, kwargs)
        refuse_trace(self.spec)
        kwargs = pass_.kwargs
        self.forwards.before(pass_)
        self.live.before_pass(module.config, pass_.compiling)
        if pass_.weights is None:  # transformers asks by the argument or by the configuration
            pass_.weights = module.config.output_attentions
        if self.reads_positions and pass_.positions is None:
            pass_.set_positions(pass_.positions_by_mask())
        if self.cuts_logits:  # Gemma 4 would cut the angles of its last layers
            kwargs["logits_to_keep"] = None
        if self.follows_length and not pass_.compiling:
            current.lengths = None if pass_.paged is None else pass_.paged.request_lengths()
        read_sequences(pass_, module, self.counting)
        if self.absolute is not None:
            self.absolute.add(module, pass_)
        self.guard.before(pass_)
        pass_.kwargs = {}  # else they would hold each other
        kwargs[PASS] = pass_
        return args[len(self.names) :], kwargs

    def after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        pass_: Pass = kwargs[PASS]
        if pass_.waiting or not pass_.ran:
            self.forwards.after(pass_)
        if pass_.cache is None and pass_.use_cache is not False:
            self.guard.after(pass_, output)
        if pass_.shifts is not None:
            note_shifts(pass_, output)
