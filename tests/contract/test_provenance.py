"""stable_reinforce through the real SDK: trained by the ids of sampled sequences, against numbers worked out by hand."""

import numpy as np
import pytest
import tinker
from data import tensor
from tinker import types

pytestmark = pytest.mark.timeout(180)
PROMPT = [1, 2, 3]


def sampled(training, **options):
    """Two sequences of three tokens from the run's weights, recorded for training."""
    client = training.save_weights_and_get_sampling_client(record_stability_info=True, **options)
    return client.sample(types.ModelInput.from_ints(PROMPT), 2, types.SamplingParams(max_tokens=3)).result(20).sequences


def datum(sequence, advantage: float, sequence_id: str | None = None) -> types.Datum:
    """As the cookbook makes it: the prompt and all but the last sampled token, and what follows each of them."""
    tokens, prompt = list(sequence.tokens), len(PROMPT)
    filler = [0] * (prompt - 1)
    made = types.Datum(
        model_input=types.ModelInput.from_ints(PROMPT + tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tensor(filler + tokens, "int64"),
            "logprobs": tensor([0.0] * (prompt - 1 + len(tokens)), "float32"),
            "advantages": tensor(filler + [advantage] * len(tokens), "float32"),
        },
    )
    name = sequence_id or sequence.sequence_id
    return made.with_provenance(
        model_input=[
            types.PromptProvenanceSpan(sequence_id=name, length=prompt),
            types.SampledProvenanceSpan(sequence_id=name, length=len(tokens) - 1),
        ],
        loss_fn_inputs=[
            types.PromptProvenanceSpan(sequence_id=name, offset=1, length=prompt - 1),
            types.SampledProvenanceSpan(sequence_id=name, length=len(tokens)),
        ],
    )


@pytest.mark.parametrize("kl_coeff", [None, 0.5])
def test_the_recorded_log_probabilities_count_and_not_those_of_the_client(training, kl_coeff):
    sequences = sampled(training)
    config = None if kl_coeff is None else {"kl_coeff": kl_coeff}
    output = training.forward_backward([datum(s, 2.0) for s in sequences], "stable_reinforce", config).result(20)
    # The tests' engine samples token 100 with log-probability -0.5 and scores it -1.1: a ratio of exp(-0.6).
    gap, lp = -0.6, -1.1
    token = sequences[0].tokens[0]
    assert list(sequences[0].tokens) == [token] * 3 and token == 100
    expected = 6 * (-np.exp(gap) * lp * 2.0 + 0.5 * (kl_coeff or 0.0) * gap**2)
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)


def test_what_was_not_recorded_is_refused_by_name(training):
    recorded = sampled(training)[0]
    plain = training.save_weights_and_get_sampling_client().sample(
        types.ModelInput.from_ints(PROMPT), 1, types.SamplingParams(max_tokens=3)).result(20).sequences[0]
    for bad in (datum(plain, 1.0), datum(recorded, 1.0, "nobody-0")):
        with pytest.raises(tinker.RequestFailedError, match="is not recorded for this session") as refused:
            training.forward_backward([datum(recorded, 1.0), bad], "stable_reinforce").result(20)
        assert refused.value.category == types.RequestErrorCategory.User
    good = training.forward_backward([datum(recorded, 1.0)], "stable_reinforce").result(20)
    assert len(good.loss_fn_outputs) == 1
