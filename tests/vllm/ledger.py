"""What an engine did not compute, read off its schedule alone: an oracle that knows none of our counters.

vLLM's scheduler says for each request from which token on it computes.  What lies between that token and the end of the
engine's own hit was served from outside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class _Promise:
    local: int  # tokens of the engine's own cache
    external: int  # tokens after them that the connector was asked to load


class Ledger:
    """Listens to the scheduler of an engine in this process."""

    def __init__(self, scheduler: Any) -> None:
        self.served = 0  # tokens from outside that were not computed
        self.promised = 0  # tokens that vLLM admitted as an external hit
        self._local: dict[str, int] = {}
        self._promises: dict[str, _Promise] = {}  # by request, until it is scheduled
        self._requests = scheduler.requests
        connector = scheduler.connector
        self._ask, self._admit = connector.get_num_new_matched_tokens, connector.update_state_after_alloc
        self._schedule = scheduler.schedule
        connector.get_num_new_matched_tokens, connector.update_state_after_alloc = self._on_ask, self._on_admission
        scheduler.schedule = self._on_schedule

    def unseen(self) -> int:
        """Tokens promised to requests that were never scheduled afterwards: they were aborted."""
        return sum(promise.external for promise in self._promises.values())

    def _on_ask(self, request: Any, local_tokens: int) -> Any:
        self._promises.pop(request.request_id, None)  # asked once more before it was scheduled: nothing came of it
        self._local[request.request_id] = local_tokens
        return self._ask(request, local_tokens)

    def _on_admission(self, request: Any, blocks: Any, external_tokens: int) -> Any:
        """Once more with 0 when a load has ended."""
        if external_tokens:
            self._promises[request.request_id] = _Promise(self._local[request.request_id], external_tokens)
            self.promised += external_tokens
        return self._admit(request, blocks, external_tokens)

    def _on_schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = self._schedule(*args, **kwargs)
        cached = output.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        for name in output.num_scheduled_tokens:
            promise = self._promises.pop(name, None)
            if promise is not None:
                self._account(promise, starts[name], self._requests[name].num_tokens)
        return output

    def _account(self, promise: _Promise, start: int, tokens: int) -> None:
        self.served += max(0, start - promise.local)
        end = promise.local + promise.external
        self.served += start == end - 1 and end == tokens  # of a hit of all tokens the last is computed once more
