"""The policy renders what the agent asks, records exactly what was sampled, and keeps to its budget."""

import asyncio
import json

import pytest
from support_policy import ScriptedSampler
from tinker_cookbook.renderers import get_renderer

from harbor_env.budget import LEFT_OUT, Budget
from harbor_env.errors import InputBudgetExceeded, RequestRefused, SamplingFailed, TurnBudgetExceeded
from harbor_env.policy import Policy
from harbor_env.record import sequences

BASH = {"type": "function", "function": {"name": "bash", "description": "Run a command",
                                         "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}}
TASK = [{"role": "system", "content": "You fix code."}, {"role": "user", "content": "Make the test pass."}]
# Spaces where json.dumps puts none: rendered anew, this call gives other tokens.
LOOK = 'Looking.\n<tool_call>\n{"name":  "bash", "arguments": {"command":"ls"}}\n</tool_call>'
DONE = "All done."


def ask(policy, index, messages, **more):
    return asyncio.run(policy.answer(index, {"model": "policy", "messages": messages, "tools": [BASH], **more}))


def after(messages, body, *observations):
    """The conversation as an agent goes on with it: our message back, then the results of its calls."""
    said = body["choices"][0]["message"]
    calls = [c["id"] for c in said.get("tool_calls", [])] or [None] * len(observations)
    return [*messages, said, *({"role": "tool" if i else "user", "tool_call_id": i, "content": text}
                               for i, text in zip(calls, observations))]


def test_text_and_calls_come_back_and_every_token_is_recorded(tokenizer, renderer):
    sampler = ScriptedSampler(tokenizer, [LOOK])
    policy = Policy(sampler, renderer, Budget(), name="e7")
    body = ask(policy, 1, TASK)
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Looking.\n"
    (call,) = choice["message"]["tool_calls"]
    assert call["id"] == "e7_1_0" and call["function"]["name"] == "bash"
    assert json.loads(call["function"]["arguments"]) == {"command": "ls"}
    (turn,) = policy.turns
    prompt, _, stop = sampler.asked[0]
    assert list(turn.prompt) == prompt and list(turn.sampled) == tokenizer.encode(LOOK) + stop
    assert turn.logprobs == tuple(-0.01 * (i + 1) for i in range(len(turn.sampled)))
    text = tokenizer.decode(turn.prompt)
    assert "You fix code." in text and '"name": "bash"' in text and text.endswith("<|im_start|>assistant\n")
    assert body["usage"]["prompt_tokens"] == len(prompt)


def test_the_prompt_without_tools_is_the_cookbooks_own(tokenizer, renderer):
    sampler = ScriptedSampler(tokenizer, [DONE])
    asyncio.run(Policy(sampler, renderer, Budget()).answer(1, {"messages": TASK}))
    assert sampler.asked[0][0] == renderer.build_generation_prompt(TASK).to_ints()


def test_the_next_prompt_extends_the_former_one_token_for_token(tokenizer, renderer):
    policy = Policy(ScriptedSampler(tokenizer, [LOOK, LOOK, DONE]), renderer, Budget())
    messages = TASK
    for index, observation in ((1, "a.py"), (2, "b.py")):
        messages = after(messages, ask(policy, index, messages), observation)
    ask(policy, 3, messages)
    (only,) = sequences(policy.turns)
    assert only.turns == [1, 2, 3]
    assert only.tokens == [*policy.turns[-1].prompt, *policy.turns[-1].sampled]
    assert sum(only.sampled) == sum(len(t.sampled) for t in policy.turns)


def test_rendering_anew_would_have_given_other_tokens(tokenizer, renderer):
    """Otherwise the test above would show nothing."""
    message, _ = renderer.parse_response(tokenizer.encode(LOOK) + renderer.get_stop_sequences())
    again = renderer.build_generation_prompt([*TASK, message]).to_ints()
    first = renderer.build_generation_prompt(TASK).to_ints()
    assert again[: len(first)] == first and again[len(first) :][: len(tokenizer.encode(LOOK))] != tokenizer.encode(LOOK)


def test_an_unusual_cut_of_a_word_into_tokens_is_repeated_as_it_was(tokenizer, renderer):
    odd = [t for letter in "Hello there" for t in tokenizer.encode(letter)] + renderer.get_stop_sequences()
    assert odd != tokenizer.encode("Hello there") + renderer.get_stop_sequences()
    policy = Policy(ScriptedSampler(tokenizer, [odd, DONE]), renderer, Budget())
    ask(policy, 2, after(TASK, ask(policy, 1, TASK), "go on"))
    assert len(sequences(policy.turns)) == 1


def test_an_answer_that_was_cut_off_is_text_and_is_extended_too(tokenizer, renderer):
    policy = Policy(ScriptedSampler(tokenizer, [LOOK, DONE]), renderer, Budget(output_tokens=9))
    body = ask(policy, 1, TASK)
    message = body["choices"][0]["message"]
    assert body["choices"][0]["finish_reason"] == "length" and "tool_calls" not in message
    assert message["content"] == tokenizer.decode(tokenizer.encode(LOOK)[:9])
    ask(policy, 2, after(TASK, body, "shorter, please"))
    assert len(policy.turns[0].sampled) == 9 and policy.turns[0].stop_reason == "length"
    assert len(sequences(policy.turns)) == 1


def test_a_malformed_call_is_text_that_the_agent_can_complain_about(tokenizer, renderer):
    broken = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}\n</tool_call>'
    policy = Policy(ScriptedSampler(tokenizer, [broken, DONE]), renderer, Budget())
    body = ask(policy, 1, TASK)
    assert body["choices"][0]["message"] == {"role": "assistant", "content": broken}
    assert body["choices"][0]["finish_reason"] == "stop"
    ask(policy, 2, after(TASK, body, "that was no JSON"))
    assert len(sequences(policy.turns)) == 1


def test_a_conversation_that_the_agent_rewrote_is_a_new_sequence(tokenizer, renderer):
    policy = Policy(ScriptedSampler(tokenizer, [LOOK, DONE]), renderer, Budget())
    messages = after(TASK, ask(policy, 1, TASK), "a.py")
    messages[2] = {"role": "assistant", "content": "I said something else."}
    ask(policy, 2, messages)
    first, second = sequences(policy.turns)
    assert "something else" in tokenizer.decode(second.tokens) and first.turns == [1] and second.turns == [2]


def test_left_out_observations_begin_a_new_sequence(tokenizer, renderer):
    policy = Policy(ScriptedSampler(tokenizer, [LOOK, LOOK, DONE]), renderer, Budget(observations_kept=1))
    messages = TASK
    for index in (1, 2):
        messages = after(messages, ask(policy, index, messages), f"listing {index}")
    ask(policy, 3, messages)
    assert [row.turns for row in sequences(policy.turns)] == [[1, 2], [3]]
    last = tokenizer.decode(policy.turns[-1].prompt)
    assert LEFT_OUT in last and "listing 1" not in last and "listing 2" in last


def test_equal_answers_keep_their_own_tokens_in_their_order(tokenizer, renderer):
    plain = tokenizer.encode("Yes")
    odd = [t for letter in "Yes" for t in tokenizer.encode(letter)]
    assert plain != odd
    end = renderer.get_stop_sequences()
    policy = Policy(ScriptedSampler(tokenizer, [odd + end, plain + end, DONE]), renderer, Budget())
    messages = TASK
    for index in (1, 2):
        messages = after(messages, ask(policy, index, messages), "again?")
    ask(policy, 3, messages)
    assert len(sequences(policy.turns)) == 1


def test_thinking_goes_into_its_own_field(tokenizer):
    think = get_renderer("qwen3_instruct", tokenizer)
    policy = Policy(ScriptedSampler(tokenizer, ["<think>hm</think>So."]), think, Budget())
    message = ask(policy, 1, TASK)["choices"][0]["message"]
    assert message["content"] == "So." and message["reasoning_content"] == "hm"


def test_a_repeated_request_gets_the_answer_that_it_got(tokenizer, renderer):
    policy = Policy(ScriptedSampler(tokenizer, [LOOK]), renderer, Budget())
    assert ask(policy, 1, TASK) is ask(policy, 1, TASK)
    assert len(policy.turns) == 1


def test_the_answer_fits_budget_context_and_the_agents_own_limit(tokenizer, renderer):
    sampler = ScriptedSampler(tokenizer, [DONE] * 3)
    length = len(renderer.build_generation_prompt(TASK).to_ints())
    for index, (budget, asked) in enumerate([
        (Budget(output_tokens=50), {}), (Budget(output_tokens=50), {"max_tokens": 20}),
        (Budget(input_tokens=length, output_tokens=30, context_tokens=length + 30), {"max_tokens": 99}),
    ]):
        asyncio.run(Policy(sampler, renderer, budget).answer(1, {"messages": TASK, **asked}))
        assert sampler.asked[index][1] == (50, 20, 30)[index]


def test_a_prompt_beyond_its_budget_ends_the_episode_by_name(tokenizer, renderer):
    length = len(renderer.build_generation_prompt(TASK).to_ints())
    sampler = ScriptedSampler(tokenizer, [DONE])
    policy = Policy(sampler, renderer, Budget(input_tokens=length - 1))
    with pytest.raises(InputBudgetExceeded, match=f"turn 1 has {length} tokens; input_tokens is {length - 1}"):
        asyncio.run(policy.answer(1, {"messages": TASK}))
    assert not sampler.asked and not policy.turns


def test_one_turn_too_many_ends_the_episode_by_name(tokenizer, renderer):
    policy = Policy(ScriptedSampler(tokenizer, [DONE] * 3), renderer, Budget(turns=2))
    ask(policy, 1, TASK), ask(policy, 2, TASK)
    with pytest.raises(TurnBudgetExceeded, match="turn 3; turns is 2"):
        ask(policy, 3, TASK)


def test_a_server_that_fails_or_is_silent_ends_the_episode_by_name(tokenizer, renderer):
    with pytest.raises(SamplingFailed, match="gave no answer: it stopped"):
        ask(Policy(ScriptedSampler(tokenizer, [RuntimeError("it stopped")]), renderer, Budget()), 1, TASK)

    class Silent:
        async def sample(self, prompt, max_tokens, stop):
            await asyncio.Event().wait()

    with pytest.raises(SamplingFailed, match="no answer within 0 s"):
        ask(Policy(Silent(), renderer, Budget(), turn_seconds=0.05), 1, TASK)


def test_a_renderer_without_tools_says_so(tokenizer):
    plain = get_renderer("role_colon", tokenizer)
    with pytest.raises(RequestRefused, match="RoleColonRenderer knows no form"):
        ask(Policy(ScriptedSampler(tokenizer, [DONE]), plain, Budget()), 1, TASK)


def test_a_renderer_with_a_text_for_its_end_keeps_its_own_way(tokenizer):
    plain = get_renderer("role_colon", tokenizer)
    end = tokenizer.encode("\n\nUser:")
    sampler = ScriptedSampler(tokenizer, [tokenizer.encode(" Yes.") + end] * 2)
    policy = Policy(sampler, plain, Budget())
    body = asyncio.run(policy.answer(1, {"messages": TASK}))
    assert body["choices"][0]["message"]["content"].strip() == "Yes."
    messages = [*TASK, body["choices"][0]["message"], {"role": "user", "content": "more"}]
    asyncio.run(policy.answer(2, {"messages": messages}))
    assert tokenizer.decode(sampler.asked[1][0]).count("User:") == 2
