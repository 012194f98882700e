"""OpenTelemetry's trace context in the meta of messages: `traceparent`, as W3C Trace Context writes it.

Only senders that are created after the process has imported `opentelemetry.trace` look for a span, in the function that
describes their values. All other senders, and all receivers, run the same code as without this module.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, Final

SWITCH: Final = "SHMTENSOR_TRACEPARENT"
"""The environment variable that, set to 0, switches it off."""


def wants_traceparent() -> bool:
    """Whether the process has imported OpenTelemetry, and the user has not switched this off."""
    return "opentelemetry.trace" in sys.modules and os.environ.get(SWITCH) != "0"


def carrying_traceparent(describe: Callable[..., Any]) -> Callable[..., Any]:
    """`describe(*what, meta)`, with the context of the span that is current at each call in the meta."""

    def described(*args: Any) -> Any:
        return describe(*args[:-1], with_context(args[-1]))

    return described


def with_context(meta: Any) -> Any:
    """The meta with `traceparent`, and `tracestate` if there is one: if a span is current, and meta is None or a dict
    without it. The user's dict is not changed."""
    if meta is not None and (not isinstance(meta, dict) or "traceparent" in meta):
        return meta
    current: Any = sys.modules["opentelemetry.trace"].get_current_span
    context = current().get_span_context()
    if not context.is_valid:
        return meta
    made = dict(meta or ())
    made["traceparent"] = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    if context.trace_state:
        made["tracestate"] = context.trace_state.to_header()
    return made
