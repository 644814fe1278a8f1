"""What a CUDA graph keeps for ever: a replay at lengths that the capture had not seen."""

import torch

from .. import reference
from ..dense import dense_decode
from .dense import make_sets
from .timing import captured

CAPTURED_AT = 2048  # tokens that were valid when the graphs were captured


def replayed(call):
    """The call in a CUDA graph: a function that replays it and returns the tensor that it writes."""
    outs = []
    graph = captured([lambda: outs.append(call())])  # runs the call twice; the second time is the captured one

    def replay():
        graph.replay()
        return outs[-1]

    return replay


def length_errors(record, heads, dtype, device):
    """Rows of the length experiment. record: takes a zero-argument call and returns its replay, such as ``replayed``.

    "frozen" slices the cache at a length that Python holds, "device lengths" masks it by a length that lies beside it. Both are right when
    Python runs them each time. error: largest difference from fp64 attention over the tokens that are valid at the replay.
    """
    ((q, kv),) = make_sets(1, heads, 1, 2 * CAPTURED_AT, dtype, device)
    now, lengths = [CAPTURED_AT], torch.full((1,), CAPTURED_AT, dtype=torch.int32, device=device)
    replays = {
        "frozen": record(lambda: dense_decode(q, *kv[:, :, :, : now[0]])),
        "device lengths": record(lambda: dense_decode(q, *kv, lengths=lengths)),
    }
    rows = []
    for tokens in (CAPTURED_AT, CAPTURED_AT + 1, CAPTURED_AT + 64, CAPTURED_AT * 3 // 2, 2 * CAPTURED_AT):
        now[0] = tokens
        lengths.fill_(tokens)
        truth, _ = reference.attention(q, *kv, lengths=[tokens])
        for arm, replay in replays.items():
            error = (replay().cpu().double() - truth).abs().max().item()
            rows.append(dict(what="length", arm=arm, batch=1, captured_at=CAPTURED_AT, tokens=tokens, error=error))
    return rows
