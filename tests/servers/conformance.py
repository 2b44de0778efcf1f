#!/usr/bin/env python3
"""Checks a server with the official clients of OpenAI and Anthropic, which validate each answer.

usage: conformance.py BASE_URL [--key KEY] [--model NAME] [--without messages,responses] [TEST ...]

The server serves the bundled model (examples/model) with the response format "hermes", and accepts
the key. --without skips the tests of endpoints that a server lacks.
"""

import argparse
import asyncio
import json
import sys
import time
import typing
import unittest
import urllib.error
import urllib.request

import anthropic
import openai
import pydantic
from prometheus_client.openmetrics.parser import text_string_to_metric_families

arguments = argparse.Namespace()

SUM = [{"role": "user", "content": "What is 7 + 5?"}]
FRANCE = "The capital of France is"
# A grammar makes the model write this response in the format of Hermes.
REPLY = '<think>It adds.</think>I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 7, "b": 5}}\n</tool_call>'
SCRIPT = {"structured_outputs": {"choice": [REPLY]}}
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


class Person(pydantic.BaseModel, extra="forbid"):
    name: typing.Literal["Anna", "Ben"]
    age: typing.Literal[31, 32]


TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}]


def needs(endpoint):
    """Skips a test if the server lacks an endpoint."""

    def decorate(test):
        def run(self):
            if endpoint in arguments.without:
                self.skipTest(f"the server has no {endpoint}")
            test(self)

        return run

    return decorate


class Test(unittest.TestCase):
    def setUp(self):
        self.model = arguments.model
        options = {"api_key": arguments.key, "max_retries": 0, "timeout": 60, "_strict_response_validation": True}
        self.openai = openai.OpenAI(base_url=arguments.url + "/v1", **options)
        # The schema of completions in the client lacks the null values of streams and of echoed prompts.
        self.lenient = openai.OpenAI(base_url=arguments.url + "/v1", **{**options, "_strict_response_validation": False})
        self.anthropic = anthropic.Anthropic(base_url=arguments.url, **options)
        for client in (self.openai, self.lenient, self.anthropic):
            self.addCleanup(client.close)

    def get(self, path):
        request = urllib.request.Request(arguments.url + path, headers={"Authorization": "Bearer " + arguments.key})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.headers, answer.read().decode()


class Service(Test):
    def test_models_are_listed(self):
        self.assertIn(self.model, [model.id for model in self.openai.models.list()])
        self.assertEqual(self.openai.models.retrieve(self.model).id, self.model)
        with self.assertRaises(openai.NotFoundError):
            self.openai.models.retrieve("none")

    def test_health_needs_no_key(self):
        with urllib.request.urlopen(arguments.url + "/health", timeout=10) as answer:
            self.assertEqual(answer.status, 200)

    def test_metrics_are_openmetrics(self):
        headers, text = self.get("/metrics")
        self.assertTrue(headers["Content-Type"].startswith("application/openmetrics-text"))
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        names = {sample.name for sample in samples if sample.labels.get("model_name") == self.model}
        self.assertIn("pagedllm_num_requests_running", names)

    def test_text_becomes_tokens_and_text_again(self):
        tokens = self.openai.post("../tokenize", body={"model": self.model, "prompt": FRANCE}, cast_to=object)
        self.assertEqual(tokens["count"], len(tokens["tokens"]))
        body = {"model": self.model, "tokens": tokens["tokens"], "skip_special_tokens": True}
        self.assertEqual(self.openai.post("../detokenize", body=body, cast_to=object)["prompt"], FRANCE)

    def test_a_wrong_key_is_refused(self):
        stranger = openai.OpenAI(base_url=arguments.url + "/v1", api_key="wrong", max_retries=0)
        self.addCleanup(stranger.close)
        with self.assertRaises(openai.AuthenticationError):
            stranger.models.list()

    def test_errors_have_the_objects_of_openai(self):
        with self.assertRaises(openai.BadRequestError) as raised:
            self.openai.completions.create(model=self.model, prompt="a", top_p=2)
        self.assertEqual((raised.exception.param, raised.exception.type), ("top_p", "invalid_request_error"))
        with self.assertRaises(openai.NotFoundError) as raised:
            self.openai.completions.create(model="none", prompt="a")
        self.assertEqual(raised.exception.code, "model_not_found")
        with self.assertRaises(openai.BadRequestError) as raised:
            self.openai.completions.create(model=self.model, prompt="a b " * 2000)
        self.assertEqual(raised.exception.code, "context_length_exceeded")
        with self.assertRaises(openai.BadRequestError):
            self.openai.completions.create(model=self.model, prompt="a", extra_body={"colour": 1})

    def test_malformed_bodies_are_refused(self):
        for body in (b"", b"{", b"[]", b'{"prompt": "\xff"}', b"null null"):
            headers = {"Content-Type": "application/json", "Authorization": "Bearer " + arguments.key}
            request = urllib.request.Request(arguments.url + "/v1/completions", body, headers)
            with self.assertRaises(urllib.error.HTTPError) as raised:
                urllib.request.urlopen(request, timeout=10)
            with raised.exception as answer:
                self.assertEqual(answer.status, 400, body)
                self.assertTrue(json.load(answer)["error"]["message"])


class Completions(Test):
    def complete(self, **options):
        client = self.lenient if "stream" in options or "echo" in options else self.openai
        return client.completions.create(**{"model": self.model, "prompt": FRANCE, "temperature": 0, **options})

    def test_a_stream_has_the_text_and_usage_of_the_whole(self):
        whole = self.complete(n=2)
        texts, usage = ["", ""], None
        for event in self.complete(n=2, stream=True, stream_options={"include_usage": True}):
            for choice in event.choices:
                texts[choice.index] += choice.text
            usage = event.usage
        self.assertEqual(texts, [choice.text for choice in whole.choices])
        self.assertEqual((usage.prompt_tokens, usage.completion_tokens), (whole.usage.prompt_tokens, whole.usage.completion_tokens))

    def test_several_prompts_have_their_answers_in_order(self):
        other = "The capital of Italy is"
        both = self.complete(prompt=[FRANCE, other])
        self.assertEqual([c.text for c in both.choices], [self.complete().choices[0].text, self.complete(prompt=other).choices[0].text])

    def test_stop_strings_and_lengths_end_the_text(self):
        stopped = self.complete(stop=["ari"]).choices[0]
        self.assertEqual((stopped.text, stopped.finish_reason), (" P", "stop"))
        cut = self.complete(max_tokens=2)
        self.assertEqual((cut.choices[0].finish_reason, cut.usage.completion_tokens), ("length", 2))

    def test_a_seed_repeats_the_text(self):
        texts = {self.complete(temperature=1.5, seed=3).choices[0].text for _ in range(3)}
        self.assertEqual(len(texts), 1)

    def test_echo_scores_the_prompt(self):
        choice = self.complete(echo=True, logprobs=1, max_tokens=0).choices[0]
        self.assertEqual(choice.text, FRANCE)
        self.assertIsNone(choice.logprobs.token_logprobs[0])
        self.assertTrue(all(value <= 0 for value in choice.logprobs.token_logprobs[1:]))

    def test_a_bias_forbids_a_token(self):
        first = self.complete(max_tokens=1, extra_body={"return_token_ids": True}).choices[0]
        biased = self.complete(max_tokens=1, logit_bias={str(first.token_ids[0]): -100}).choices[0]
        self.assertNotEqual(first.text, biased.text)

    def test_best_of_returns_n_choices(self):
        self.assertEqual(len(self.complete(n=2, best_of=3, temperature=1, seed=1).choices), 2)

    def test_beam_search_is_an_extension(self):
        choices = self.complete(temperature=None, n=2, extra_body={"beam": {"width": 3}}).choices
        self.assertGreaterEqual(choices[0].score, choices[1].score)


class Chats(Test):
    def chat(self, **options):
        return self.openai.chat.completions.create(**{"model": self.model, "messages": SUM, "temperature": 0, **options})

    def test_a_stream_has_the_text_of_the_whole(self):
        whole = self.chat()
        self.assertEqual((whole.choices[0].message.content, whole.choices[0].finish_reason), ("12", "stop"))
        events = list(self.chat(stream=True, stream_options={"include_usage": True}))
        self.assertEqual("".join(e.choices[0].delta.content or "" for e in events if e.choices), "12")
        self.assertEqual(events[0].choices[0].delta.role, "assistant")
        self.assertEqual(events[-1].usage.total_tokens, whole.usage.total_tokens)

    def test_log_probabilities_have_bytes(self):
        entry = self.chat(logprobs=True, top_logprobs=3).choices[0].logprobs.content[0]
        self.assertEqual(bytes(entry.bytes), b"12")
        self.assertEqual(len(entry.top_logprobs), 3)
        self.assertEqual(entry.top_logprobs[0].logprob, entry.logprob)

    def test_a_schema_is_parsed(self):
        messages = [{"role": "user", "content": "Give JSON for Anna, 31, Paris."}]
        options = {"model": self.model, "messages": messages, "response_format": Person, "max_tokens": 100, "temperature": 0}
        person = self.openai.chat.completions.parse(**options).choices[0].message.parsed
        self.assertIsInstance(person, Person)
        with self.openai.chat.completions.stream(**options) as stream:
            self.assertEqual(stream.get_final_completion().choices[0].message.parsed, person)

    def test_tools_and_reasoning_are_separated(self):
        whole = self.chat(tools=TOOLS, extra_body=SCRIPT).choices[0]
        self.assertEqual(whole.finish_reason, "tool_calls")
        self.assertEqual(whole.message.reasoning_content, "It adds.")
        self.assertEqual(json.loads(whole.message.tool_calls[0].function.arguments), {"a": 7, "b": 5})
        options = {"model": self.model, "messages": SUM, "tools": TOOLS, "extra_body": SCRIPT}
        with self.openai.chat.completions.stream(**options) as stream:
            streamed = stream.get_final_completion().choices[0]
        self.assertEqual(streamed.message.tool_calls[0].function.arguments, whole.message.tool_calls[0].function.arguments)
        self.assertEqual(streamed.message.content, whole.message.content)

    def test_a_forced_call_has_valid_arguments(self):
        for choice in ("required", {"type": "function", "function": {"name": "add"}}):
            call = self.chat(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, max_tokens=200).choices[0].message.tool_calls[0]
            self.assertEqual(sorted(json.loads(call.function.arguments)), ["a", "b"])

    def test_an_answer_can_be_sent_back(self):
        answer = self.chat(tools=TOOLS, extra_body=SCRIPT).choices[0].message
        result = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "12"}
        again = self.chat(messages=[*SUM, answer.to_dict(), result])
        self.assertTrue(again.choices[0].message.content)

    def test_fifty_chats_at_once_have_the_text_of_one(self):
        async def ask_all():
            options = {"base_url": arguments.url + "/v1", "api_key": arguments.key, "max_retries": 0}
            async with openai.AsyncOpenAI(**options) as client:
                return await asyncio.gather(*(self.ask(client, i % 2 == 0) for i in range(50)))

        self.assertEqual(set(asyncio.run(ask_all())), {"12"})

    async def ask(self, client, streams):
        answer = await client.chat.completions.create(model=self.model, messages=SUM, temperature=0, stream=streams)
        if not streams:
            return answer.choices[0].message.content
        return "".join([event.choices[0].delta.content or "" async for event in answer])

    def test_closing_a_stream_aborts_the_request(self):
        before = self.aborted()
        stream = self.lenient.completions.create(model=self.model, prompt="Count", max_tokens=1000, stream=True, extra_body={"ignore_eos": True, "n": 8})
        next(iter(stream))
        stream.close()
        for _ in range(100):
            if self.aborted() >= before + 8:
                return
            time.sleep(0.1)
        self.fail("the request was not aborted")

    def aborted(self):
        name = f'pagedllm_request_success_total{{finished_reason="abort",model_name="{self.model}"}} '
        other = f'pagedllm_request_success_total{{model_name="{self.model}",finished_reason="abort"}} '
        lines = self.get("/metrics")[1].splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name, other)))


class Messages(Test):
    def create(self, **options):
        # The client lacks the temperature and the parameters of the library.
        extra = {"temperature": 0, **options.pop("extra_body", {})}
        return {"model": self.model, "max_tokens": 100, "messages": SUM, "extra_body": extra, **options}

    @needs("messages")
    def test_a_message_has_text(self):
        message = self.anthropic.messages.create(**self.create(system="Be brief."))
        self.assertEqual((message.content[0].type, message.stop_reason), ("text", "end_turn"))
        self.assertGreater(message.usage.input_tokens, 0)
        with self.anthropic.messages.stream(**self.create(system="Be brief.")) as stream:
            self.assertEqual(stream.get_final_message().content[0].text, message.content[0].text)

    @needs("messages")
    def test_thinking_and_tools_are_blocks(self):
        options = self.create(tools=[{"name": "add", "input_schema": PARAMETERS}], extra_body=SCRIPT)
        message = self.anthropic.messages.create(**options)
        self.assertEqual([block.type for block in message.content], ["thinking", "text", "tool_use"])
        self.assertEqual((message.content[2].input, message.stop_reason), ({"a": 7, "b": 5}, "tool_use"))
        with self.anthropic.messages.stream(**options) as stream:
            final = stream.get_final_message()
        self.assertEqual([block.type for block in final.content], ["thinking", "text", "tool_use"])
        self.assertEqual(final.content[2].input, {"a": 7, "b": 5})
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": final.content[2].id, "content": "12"}]}
        answer = {"role": "assistant", "content": [block.to_dict() for block in final.content]}
        self.assertTrue(self.anthropic.messages.create(**self.create(messages=[*SUM, answer, result])).content)

    @needs("messages")
    def test_a_tool_can_be_forced(self):
        tools = [{"name": "add", "input_schema": PARAMETERS}]
        message = self.anthropic.messages.create(**self.create(tools=tools, tool_choice={"type": "tool", "name": "add"}, max_tokens=200))
        self.assertEqual(sorted(message.content[0].input), ["a", "b"])

    @needs("messages")
    def test_a_schema_is_followed(self):
        output = {"format": {"type": "json_schema", "schema": Person.model_json_schema()}}
        message = self.anthropic.messages.create(**self.create(output_config=output))
        Person.model_validate_json(message.content[0].text)

    @needs("messages")
    def test_tokens_are_counted(self):
        count = self.anthropic.messages.count_tokens(model=self.model, messages=SUM).input_tokens
        usage = self.anthropic.messages.create(**self.create()).usage
        self.assertEqual(count, usage.input_tokens + usage.cache_read_input_tokens)

    @needs("messages")
    def test_errors_have_the_objects_of_anthropic(self):
        with self.assertRaises(anthropic.BadRequestError) as raised:
            self.anthropic.messages.create(**self.create(extra_body={"top_p": 2}))
        self.assertEqual(raised.exception.body["error"]["type"], "invalid_request_error")
        stranger = anthropic.Anthropic(base_url=arguments.url, api_key="wrong", max_retries=0)
        self.addCleanup(stranger.close)
        with self.assertRaises(anthropic.AuthenticationError):
            stranger.messages.create(**self.create())


class Responses(Test):
    def create(self, **options):
        return {"model": self.model, "input": "What is 7 + 5?", "temperature": 0, **options}

    @needs("responses")
    def test_a_response_has_text(self):
        response = self.openai.responses.create(**self.create(instructions="Be brief."))
        self.assertEqual(response.status, "completed")
        self.assertTrue(response.output_text)
        with self.openai.responses.stream(**self.create(instructions="Be brief.")) as stream:
            deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            final = stream.get_final_response()
        self.assertEqual((final.output_text, deltas), (response.output_text, response.output_text))
        self.assertEqual(final.usage.total_tokens, response.usage.total_tokens)

    @needs("responses")
    def test_reasoning_and_calls_are_items(self):
        tools = [{"type": "function", "name": "add", "parameters": PARAMETERS, "strict": True}]
        options = self.create(tools=tools, extra_body=SCRIPT)
        kinds = ["reasoning", "message", "function_call"]
        response = self.openai.responses.create(**options)
        self.assertEqual([item.type for item in response.output], kinds)
        with self.openai.responses.stream(**options) as stream:
            final = stream.get_final_response()
        self.assertEqual([item.type for item in final.output], kinds)
        self.assertEqual(json.loads(final.output[2].arguments), {"a": 7, "b": 5})
        result = {"type": "function_call_output", "call_id": final.output[2].call_id, "output": "12"}
        question = {"role": "user", "content": "What is 7 + 5?"}
        items = [question, *(item.to_dict() for item in response.output), result]
        self.assertEqual(self.openai.responses.create(**self.create(input=items)).status, "completed")

    @needs("responses")
    def test_a_schema_is_parsed(self):
        response = self.openai.responses.parse(**self.create(input="Give JSON for Anna, 31, Paris.", text_format=Person, max_output_tokens=100))
        self.assertIsInstance(response.output_parsed, Person)

    @needs("responses")
    def test_a_length_makes_it_incomplete(self):
        response = self.openai.responses.create(**self.create(max_output_tokens=1, input="Tell me a story about a dog."))
        self.assertEqual((response.status, response.incomplete_details.reason), ("incomplete", "max_output_tokens"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--key", default="test")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--without", type=lambda text: text.split(","), default=[])
    parser.add_argument("tests", nargs="*")
    parser.parse_args(namespace=arguments)
    unittest.main(argv=[sys.argv[0], *arguments.tests])


if __name__ == "__main__":
    main()
