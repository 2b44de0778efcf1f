#!/usr/bin/env python3
"""Checks the page of a server in headless Chromium.

usage: page.py PROGRAM [--screenshots FOLDER] [TEST ...]

PROGRAM is server-go. The script starts it with the bundled model, and with the further flags in
SERVER_FLAGS. --screenshots writes the pictures of docs/servers.md instead of running the tests.
"""

import argparse
import collections
import json
import os
import pathlib
import re
import shutil
import sys
import unittest

import hostile
import page_support
from page_support import Load, call_delta, delta
from playwright.sync_api import expect, sync_playwright

TIMEOUT = 60_000  # milliseconds; machines with load are slow
DESKTOP = {"viewport": {"width": 1280, "height": 900}}
PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}
# A grammar makes the model write this response in the format of Hermes.
REPLY = '<think>It adds.</think>I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 7, "b": 5}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}]
MARKUP = '<img src="/x" onerror="hacked = 1"><script>hacked = 1</script>&amp;'


def launch(playwright):
    # Chromium refuses its sandbox to root.
    return playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"] if os.geteuid() == 0 else [])


def setUpModule():
    global browser, open_server
    playwright = sync_playwright().start()
    unittest.addModuleCleanup(playwright.stop)
    browser = launch(playwright)
    unittest.addModuleCleanup(browser.close)
    expect.set_options(timeout=TIMEOUT)
    open_server = hostile.Server("-kv-bytes", "8MiB", "-threads", "1", keys="")
    unittest.addModuleCleanup(open_server.stop)


class PageTest(unittest.TestCase):
    """Each test fails if the browser reports an error or contacts another host."""

    expected_error = None  # a pattern of the console's errors that the test causes

    def setUp(self):
        self.problems = []
        self.addCleanup(lambda: self.assertEqual(self.problems, []))

    def stub(self):
        stub = page_support.Stub(open_server)
        self.addCleanup(stub.stop)
        self.addCleanup(stub.send, None)
        return stub

    def open(self, url=None, **options):
        url = url or f"http://127.0.0.1:{open_server.port}/"
        context = browser.new_context(**{**DESKTOP, **options})
        context.set_default_timeout(TIMEOUT)
        self.addCleanup(context.close)
        page = context.new_page()
        page.on("console", self.check_message)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("dialog", lambda dialog: self.problems.append(dialog.message))
        page.on("request", lambda request: self.check_request(request, url))
        page.goto(url)
        return page

    def check_message(self, message):
        if message.type == "error" and not (self.expected_error and re.search(self.expected_error, message.text)):
            self.problems.append(message.text)

    def check_request(self, request, url):
        if not request.url.startswith((url, "data:")):
            self.problems.append(request.url)

    def send(self, page, text):
        page.get_by_label("Message", exact=True).fill(text)
        page.keyboard.press("Enter")

    def expect_status(self, page, text):
        expect(page.locator("#status")).to_have_text(text)


class Chat(PageTest):
    def test_the_model_answers_and_remembers_the_conversation(self):
        page = self.open()
        page.get_by_text("Settings").click()
        page.get_by_label("Temperature").fill("0")
        self.send(page, "What is 7 + 5?")
        expect(page.locator(".content").last).to_have_text("12")
        self.expect_status(page, "Complete.")
        expect(page.locator(".assistant p")).to_contain_text("2 tokens in ")
        self.send(page, "What is the capital of France?")
        expect(page.locator(".content").last).to_have_text("The capital of France is Paris.")
        expect(page.locator(".user")).to_have_count(2)
        with page.expect_request("**/v1/chat/completions") as request:
            self.send(page, "Hello!")
        self.assertEqual([message["content"] for message in request.value.post_data_json["messages"]], ["What is 7 + 5?", "12", "What is the capital of France?", "The capital of France is Paris.", "Hello!"])
        self.assertEqual((request.value.post_data_json["model"], request.value.post_data_json["temperature"]), ("tiny", 0))
        page.get_by_role("button", name="New chat").click()
        expect(page.locator(".message")).to_have_count(0)
        with page.expect_request("**/v1/chat/completions") as request:
            self.send(page, "Hello!")
        self.assertEqual(len(request.value.post_data_json["messages"]), 1)

    def test_text_appears_while_it_is_generated(self):
        stub = self.stub()
        page = self.open(stub.url)
        self.send(page, "Hi")
        stub.send(delta(role="assistant"), delta(content="One"))
        expect(page.locator(".content")).to_have_text("One")
        self.expect_status(page, "Generating…")
        stub.send(delta(content=" two"), None)
        expect(page.locator(".content")).to_have_text("One two")
        self.expect_status(page, "Complete.")

    def test_stop_ends_the_request_and_keeps_the_text(self):
        page = self.open()
        page.route("**/v1/chat/completions", lambda route: route.continue_(post_data=json.dumps({**route.request.post_data_json, "ignore_eos": True, "max_tokens": 900})))
        with Load(open_server, *[{"max_tokens": 200}] * 12):
            aborted = open_server.aborted()
            self.send(page, "Tell me a story about a dog.")
            expect(page.locator(".content")).to_contain_text("Once")
            page.get_by_role("button", name="Stop").click()
            self.expect_status(page, "Stopped.")
            open_server.wait_for(lambda: open_server.aborted() == aborted + 1)
            expect(page.locator(".content")).to_contain_text("Once")
            expect(page.locator(".problem:visible")).to_have_count(0)

    def test_the_message_returns_if_there_is_no_answer(self):
        self.expected_error = "status of 400"
        page = self.open()
        page.get_by_text("Settings").click()
        page.get_by_label("System prompt").fill("dog " * 3000)
        self.send(page, "Hello!")
        messages = [{"role": "system", "content": "dog " * 2999 + "dog"}, {"role": "user", "content": "Hello!"}]
        status, _, body = open_server.ask("/v1/chat/completions", {"messages": messages})
        self.assertEqual(status, 400)
        expect(page.locator("#messages .problem")).to_have_text("400: " + json.loads(body)["error"]["message"])
        expect(page.get_by_label("Message", exact=True)).to_have_value("Hello!")
        expect(page.locator(".message")).to_have_count(0)
        page.get_by_label("System prompt").fill("")
        with page.expect_request("**/v1/chat/completions") as request:
            page.get_by_label("Message", exact=True).press("Enter")
        self.assertEqual(request.value.post_data_json["messages"], [{"role": "user", "content": "Hello!"}])
        expect(page.locator(".content")).to_have_text("Hello! How can I help you today?")
        expect(page.locator("#messages .problem")).to_have_count(0)

    def test_a_message_that_is_stopped_before_its_answer_returns(self):
        stub = self.stub()
        page = self.open(stub.url)
        self.send(page, "Hi")
        self.expect_status(page, "Generating…")
        page.keyboard.press("Escape")
        self.expect_status(page, "Stopped.")
        expect(page.get_by_label("Message", exact=True)).to_have_value("Hi")
        expect(page.locator(".message")).to_have_count(0)

    def test_an_error_within_a_stream_follows_the_text(self):
        stub = self.stub()
        page = self.open(stub.url)
        self.send(page, "Hi")
        stub.send(delta(content="One"), {"error": {"message": "the engine is closed"}})
        expect(page.locator("#messages .problem")).to_have_text("the engine is closed")
        expect(page.locator(".content")).to_have_text("One")

    def test_settings_are_checked_before_they_are_sent(self):
        stub = self.stub()
        page = self.open(stub.url)
        page.get_by_text("Settings").click()
        page.get_by_label("Tools").fill('[{"type": ')
        self.send(page, "Hi")
        expect(page.locator("#messages .problem")).to_contain_text("not valid JSON")
        page.get_by_label("Tools").fill("")
        page.get_by_label("Maximum tokens").fill("0")
        page.get_by_text("Settings").click()
        page.get_by_label("Message", exact=True).press("Enter")
        expect(page.get_by_label("Maximum tokens")).to_be_focused()
        self.assertEqual(stub.requests, [])

    def test_reasoning_and_calls_of_the_model_are_separated(self):
        page = self.open()
        page.route("**/v1/chat/completions", reply_with_call)
        page.get_by_text("Settings").click()
        page.get_by_label("Tools").fill(json.dumps(TOOLS))
        self.send(page, "What is 7 + 5?")
        expect(page.locator(".arguments")).to_have_text('{"a": 7, "b": 5}')
        self.expect_status(page, "Complete.")
        expect(page.locator(".content")).to_have_text(re.compile(r"^I add\.\s*$"))
        expect(page.locator(".message details .text")).to_be_hidden()
        page.get_by_text("Reasoning").click()
        expect(page.locator(".message details .text")).to_have_text("It adds.")
        page.unroute("**/v1/chat/completions")
        page.get_by_label("Result of add").fill("12")
        with page.expect_request("**/v1/chat/completions") as request:
            page.get_by_role("button", name="Send result").click()
        user, answer, result = request.value.post_data_json["messages"]
        self.assertEqual((user["role"], answer["reasoning_content"]), ("user", "It adds."))
        self.assertEqual(answer["tool_calls"][0]["function"], {"name": "add", "arguments": '{"a": 7, "b": 5}'})
        self.assertEqual(result, {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "name": "add", "content": "12"})
        self.expect_status(page, "Complete.")
        expect(page.locator(".assistant")).to_have_count(2)
        expect(page.locator("#messages .problem")).to_have_count(0)

    def test_the_arguments_of_calls_appear_while_they_are_generated(self):
        stub = self.stub()
        page = self.open(stub.url)
        self.send(page, "Add.")
        stub.send(delta(reasoning_content="It"))
        expect(page.locator("details .text")).to_have_text("It")
        stub.send(call_delta("", id="call00001", type="function", name="add"), call_delta('{"a": 7'))
        expect(page.locator(".arguments")).to_have_text('{"a": 7')
        expect(page.get_by_label("Result of add")).to_have_count(0)
        stub.send(call_delta(', "b": 5}'), None)
        expect(page.locator(".arguments")).to_have_text('{"a": 7, "b": 5}')
        page.get_by_label("Result of add").fill("12")
        page.get_by_label("Result of add").press("Enter")
        stub.send(delta(content="It is 12."), None)
        expect(page.locator(".content")).to_have_text("It is 12.")
        self.assertEqual(stub.requests[1]["messages"][2]["content"], "12")

    def test_markup_is_text(self):
        stub = self.stub()
        stub.model = MARKUP
        page = self.open(stub.url)
        expect(page.locator("#model option")).to_have_text(MARKUP)
        self.send(page, MARKUP)
        stub.send(delta(reasoning_content=MARKUP), delta(content=MARKUP), call_delta(json.dumps(MARKUP), id=MARKUP, name=MARKUP), {"error": {"message": MARKUP}})
        expect(page.locator("#messages .problem")).to_have_text(MARKUP)
        for place in (".user .text", "details .text", ".content"):
            expect(page.locator(place)).to_have_text(MARKUP)
        expect(page.locator(".arguments")).to_have_text(json.dumps(MARKUP))
        expect(page.locator(".call h3")).to_have_text(f"Call of {MARKUP} {MARKUP}")
        self.assertEqual(page.evaluate("[document.querySelectorAll('img, main script').length, typeof hacked]"), [0, "undefined"])

    def test_the_policy_refuses_markup_scripts_and_other_hosts(self):
        self.expected_error = "Content Security Policy|TrustedHTML"
        page = self.open()
        refused = page.evaluate("""async () => {
            const refused = [];
            try { document.body.innerHTML = "<b>"; } catch { refused.push("markup"); }
            await new Promise(resolve => setTimeout(resolve)); // its violation is reported by now
            const violated = new Promise(resolve => addEventListener("securitypolicyviolation", event => resolve(event.effectiveDirective)));
            try { await fetch("http://127.0.0.2:1/"); } catch { refused.push(await violated); }
            return refused;
        }""")
        self.assertEqual(refused, ["markup", "connect-src"])
        _, headers, body = open_server.ask("/")
        self.assertNotIn("unsafe", headers["Content-Security-Policy"])
        self.assertNotIn(b" style=", body)


class Keys(PageTest):
    def setUp(self):
        super().setUp()
        self.expected_error = "status of 401"

    @classmethod
    def setUpClass(cls):
        cls.server = hostile.Server("-threads", "1")
        cls.addClassCleanup(cls.server.stop)

    def test_the_page_needs_a_key_if_the_server_does(self):
        page = self.open(f"http://127.0.0.1:{self.server.port}/")
        dialog = page.get_by_role("dialog", name="API key")
        expect(dialog).to_contain_text("the request has no API key")
        page.get_by_label("Key", exact=True).fill("wrong")
        page.get_by_role("button", name="Use").click()
        expect(dialog).to_contain_text("the API key is not valid")
        page.get_by_label("Key", exact=True).fill(hostile.KEY)
        page.keyboard.press("Enter")
        expect(dialog).to_be_hidden()
        expect(page.locator("#model option")).to_have_text("tiny")
        expect(page.locator("#figures div").first).to_be_visible()
        page.reload()
        expect(page.locator("#model option")).to_have_text("tiny")
        self.send(page, "What is 7 + 5?")
        expect(page.locator(".content")).to_be_visible()
        expect(dialog).to_be_hidden()
        self.assertEqual(page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]"), [1, 0, ""])

    def test_the_dialog_opens_again_only_for_the_user(self):
        page = self.open(f"http://127.0.0.1:{self.server.port}/")
        dialog = page.get_by_role("dialog", name="API key")
        expect(dialog).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator("#messages .problem")).to_contain_text("401: ")
        expect(page.locator("#engine-problem")).to_contain_text("401: ")
        with page.expect_response("**/engine/snapshot*"):
            pass
        expect(dialog).to_be_hidden()
        self.send(page, "What is 7 + 5?")
        expect(dialog).to_be_visible()
        page.get_by_label("Key", exact=True).fill(hostile.KEY)
        page.keyboard.press("Enter")
        expect(page.locator(".content")).to_have_text("12")
        expect(page.locator("#model option")).to_have_text("tiny")
        expect(page.locator("#engine-problem")).to_be_hidden()


# The state of each block as its pixels show it: middle, and lower right.
DRAWN = """map => {
    const context = map.canvas.getContext("2d");
    const rgba = colour => { const c = new OffscreenCanvas(1, 1).getContext("2d"); c.fillStyle = colour; c.fillRect(0, 0, 1, 1); return c.getImageData(0, 0, 1, 1).data.join(); };
    const [free, ink] = [rgba(colours.free), rgba(colours.ink)];
    const size = map.cell - (map.cell > 8 ? 2 : 1);
    return map.blocks.map((_, i) => {
        const [x, y] = [i % map.columns * map.cell, Math.floor(i / map.columns) * map.cell];
        const pixel = (a, b) => context.getImageData(Math.floor(x + a * size), Math.floor(y + b * size), 1, 1).data;
        if (pixel(0.4, 0.4)[3] === 0) return "cached";
        if (pixel(0.4, 0.4).join() === free) return "free";
        return pixel(0.8, 0.8).join() === ink ? "shared" : "used";
    });
}"""
# The texts of all blocks, by the keys that a user can press.
DESCRIBED = """id => {
    const press = key => byId(id).dispatchEvent(new KeyboardEvent("keydown", { key }));
    press("Home");
    return pool.blocks.map(() => { const text = byId(id + "-block").textContent; press("ArrowRight"); return text; });
}"""


def blocks_of(tier):
    """The state, the number of sequences and the owner of each block."""
    return [(run[1], *run[2:]) for run in tier["runs"] for _ in range(run[0])]


def state_of(block):
    return "shared" if block[0] == "used" and block[1] > 1 else block[0]


class Engine(PageTest):
    def figure(self, page, name):
        return page.locator("#figures div", has=page.get_by_text(name, exact=True)).locator(".value")

    def check_map(self, page, snapshot):
        """Compares the map with a snapshot that the page shows."""
        blocks = blocks_of(snapshot["pool"])
        states = [state_of(block) for block in blocks]
        count = collections.Counter(states)
        self.assertEqual((count["used"] + count["shared"], count["cached"], count["free"]), tuple(snapshot["pool"][name] for name in ("used", "cached", "free")))
        expect(page.locator("#pool-legend li")).to_have_text([f"one sequence {count['used']}", f"shared {count['shared']}", f"cached {count['cached']}", f"free {count['free']}"])
        self.assertEqual(page.evaluate(f"({DRAWN})(pool)"), states)
        for i, (text, block) in enumerate(zip(page.evaluate(DESCRIBED, "pool"), blocks, strict=True)):
            owner = f"sequence {block[2]}" if block[0] == "used" and block[2] else "an unknown sequence"
            state = {"used": f"used by {owner}", "cached": "cached; the prefix cache alone has it", "free": "free"}.get(state_of(block))
            self.assertEqual(text, f"Block {i}: " + (state or f"shared by {block[1]} sequences, one of them {owner}"))

    def test_a_snapshot_is_shown(self):
        stub = self.stub()
        page = self.open(stub.url)
        expect(self.figure(page, "Running")).to_have_text("2")
        for name, value in {"Waiting": "1", "Prefix cache hits": "25 %", "Preemptions": "4", "Generated tokens/s": "0"}.items():
            expect(self.figure(page, name)).to_have_text(value)
        self.check_map(page, page_support.SNAPSHOT)
        expect(page.locator("#host-legend li")).to_have_text(["one sequence 2", "shared 0", "cached 0", "free 6"])
        self.assertEqual(page.evaluate(f"({DRAWN})(host)"), ["used"] * 2 + ["free"] * 6)
        expect(page.locator("#sequences tr")).to_have_text([re.compile("41 ?running120 of 4008"), re.compile("42 ?running150 of 40010"), re.compile(r"43 ?waiting30 of 602 \(host\)")])
        expect(page.locator("#more-sequences")).to_have_text("and 5 more")
        page.locator("#steps").focus()
        page.keyboard.press("Home")
        expect(page.locator("#step")).to_have_text("64 prompt and 1 generated tokens of 2 sequences in 2.00 ms, 0.4 s ago")
        stub.snapshot = {**page_support.SNAPSHOT, "time": 13.5, "counts": {**page_support.SNAPSHOT["counts"], "generated_tokens": 9700}}
        expect(self.figure(page, "Generated tokens/s")).to_have_text("700")
        stub.snapshot = {**page_support.SNAPSHOT, "pool": {"blocks": 100000, "free": 20, "cached": 0, "used": 0, "runs": [[20, "free"]]}}
        expect(page.locator("#pool-size")).to_have_text("100,000 blocks of 16 tokens; the map has the first 20")

    def test_the_pointer_selects_a_block_and_its_sequence(self):
        page = self.open(self.stub().url)
        expect(page.locator("#sequences tr")).to_have_count(3)
        middle = page.evaluate("pool.cell / 2")
        page.locator("#pool").hover(position={"x": middle, "y": middle})
        expect(page.locator("#pool-block")).to_have_text("Block 0: shared by 2 sequences, one of them sequence 41")
        page.locator("#pool").click(position={"x": 17 * middle * 2 + middle, "y": middle})
        page.mouse.move(0, 0)
        expect(page.locator("#pool-block")).to_have_text("Block 17: used by sequence 42")
        button = page.get_by_role("button", name="42")
        button.click()
        expect(button).to_have_attribute("aria-pressed", "true")
        self.assertEqual(page.evaluate("[pool.owner, host.owner]"), [42, 42])

    def test_the_map_equals_the_state_of_the_engine(self):
        page = self.open()
        snapshots = []
        def has_all_states():
            snapshots.append(json.loads(open_server.ask("/engine/snapshot?model=tiny")[2]))
            return {state_of(block) for block in blocks_of(snapshots[-1]["pool"])} == {"used", "shared", "cached", "free"}
        with Load(open_server, {"n": 4}, {"n": 3, "max_tokens": 40, "prompt": "A cow. " + page_support.PROMPT}):
            open_server.wait_for(has_all_states)
        page.route("**/engine/snapshot*", lambda route: route.fulfill(json=snapshots[-1]))
        expect(page.locator("#pool-legend li").nth(1)).not_to_have_text("shared 0")
        expect(page.locator("#sequences tr")).to_have_count(len(snapshots[-1]["sequences"]))
        self.check_map(page, snapshots[-1])

    def test_the_view_follows_the_engine(self):
        page = self.open()
        expect(self.figure(page, "Running")).to_have_text("0")
        with Load(open_server, {"n": 5}):
            expect(self.figure(page, "Running")).to_have_text("5")
            expect(page.locator("#sequences tr")).to_have_count(5)
            expect(self.figure(page, "Generated tokens/s")).not_to_have_text("0")
            expect(page.locator("#pool-legend li").first).not_to_have_text("one sequence 0")
            expect(page.locator("#steps")).to_have_attribute("aria-label", re.compile("of 5 sequences"))
        expect(self.figure(page, "Running")).to_have_text("0")
        expect(page.locator("#pool-legend li").first).to_have_text("one sequence 0")
        expect(page.locator("#sequences tr")).to_have_count(0)

    def test_the_page_polls_at_most_twice_a_second_and_only_while_it_is_visible(self):
        page = self.open()
        times = "performance.getEntriesByType('resource').filter(entry => entry.name.includes('snapshot')).map(entry => entry.startTime)"
        open_server.wait_for(lambda: len(page.evaluate(times)) > 2)
        starts = page.evaluate(times)
        # The browser notes a start some milliseconds after the call, and not always equally late.
        self.assertGreater(min(later - earlier for earlier, later in zip(starts, starts[1:])), 450)
        hide = "isHidden => { Object.defineProperty(document, 'hidden', { value: isHidden, configurable: true }); document.dispatchEvent(new Event('visibilitychange')); }"
        page.evaluate(hide, True)
        open_server.wait_for(lambda: not page.evaluate("isPolling"))
        before = page.evaluate(times)
        open_server.wait_for(lambda: page.evaluate("performance.now()") > before[-1] + 1200)
        self.assertEqual(page.evaluate(times), before)
        page.evaluate(hide, False)
        open_server.wait_for(lambda: len(page.evaluate(times)) > len(before))


class Access(PageTest):
    def test_the_keyboard_is_enough(self):
        stub = self.stub()
        page = self.open(stub.url)
        expect(page.locator("#sequences tr")).to_have_count(3)
        keys = page.keyboard
        expect(page.get_by_label("Message", exact=True)).to_be_focused()
        keys.type("One")
        keys.press("Shift+Enter")
        keys.type("two")
        keys.press("Enter")
        stub.send(delta(content="A"))
        expect(page.locator(".content")).to_have_text("A")
        self.assertEqual(stub.requests[0]["messages"], [{"role": "user", "content": "One\ntwo"}])
        keys.press("Escape")
        self.expect_status(page, "Stopped.")
        visited = []
        while (visited or [""])[-1] != "43":
            keys.press("Tab")
            name, outline = page.evaluate("(e => [e.id || e.textContent.trim(), getComputedStyle(e).outlineStyle])(document.activeElement)")
            self.assertNotEqual(outline, "none", name)
            self.assertLess(len(visited), 20, visited)
            visited.append(name)
            if name == "pool":
                expect(page.locator("#pool-block")).to_contain_text("Block 0: ")
                keys.press("End")
                keys.press("ArrowLeft")
                expect(page.locator("#pool-block")).to_have_text("Block 38: free")
        self.assertEqual(visited, ["new-chat", "send", "pool", "host", "steps", "41", "42", "43"])
        keys.press("Enter")
        expect(page.get_by_role("button", name="43")).to_have_attribute("aria-pressed", "true")

    def test_every_control_has_a_name(self):
        page = self.open(self.stub().url)
        page.locator("#sequences tr").first.wait_for()
        page.get_by_text("Settings").click()
        unnamed = page.evaluate("""() => [...document.querySelectorAll("button, input, textarea, select, canvas, [role]")]
            .filter(e => !(e.labels?.length || e.getAttribute("aria-label") || e.textContent.trim() || e.getAttribute("aria-labelledby") || e.role === "status" || e.role === "alert"))
            .map(e => e.outerHTML)""")
        self.assertEqual(unnamed, [])

    def test_a_phone_has_one_column_with_tabs(self):
        page = self.open(**PHONE)
        overflow = "document.documentElement.scrollWidth - innerWidth"
        page.get_by_text("Settings").tap()
        self.assertEqual(page.evaluate(overflow), 0)
        page.get_by_label("Maximum tokens").fill("5")
        page.get_by_text("Settings").tap()
        page.get_by_label("Message", exact=True).fill("x" * 200)
        page.get_by_role("button", name="Send").tap()
        expect(page.locator(".user .text")).to_have_text("x" * 200)
        self.expect_status(page, "Complete.")
        expect(page.get_by_role("tabpanel", name="Engine")).to_be_hidden()
        self.assertEqual(page.evaluate(overflow), 0)
        self.assertEqual(page.evaluate("messages.scrollWidth - messages.clientWidth"), 0)
        self.assertEqual(page.evaluate("performance.getEntriesByType('resource').filter(entry => entry.name.includes('snapshot')).length"), 0)
        with Load(open_server, {"n": 3}):
            page.get_by_role("tab", name="Engine").tap()
            expect(page.locator("#sequences tr")).to_have_count(3)
            expect(page.get_by_role("tabpanel", name="Chat")).to_be_hidden()
            self.assertEqual(page.evaluate(overflow), 0)
            self.assertEqual(page.evaluate("[...document.querySelectorAll('#engine *')].filter(e => e.getBoundingClientRect().right > innerWidth).map(e => e.outerHTML)"), [])
            page.locator("#pool").tap(position={"x": 4, "y": 4})
            expect(page.locator("#pool-block")).to_contain_text("Block 0: ")
        page.get_by_role("tab", name="Engine").focus()
        page.keyboard.press("ArrowLeft")
        expect(page.get_by_role("tab", name="Chat")).to_be_focused()
        expect(page.get_by_role("tabpanel", name="Chat")).to_be_visible()


def reply_with_call(route):
    route.continue_(post_data=json.dumps({**route.request.post_data_json, "structured_outputs": {"choice": [REPLY]}}))


def converse(page, text):
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_have_text("Complete.")


def take_screenshots(browser, server, folder):
    def open_page(**options):
        page = browser.new_context(**options).new_page()
        page.goto(f"http://127.0.0.1:{server.port}/")
        return page

    def wait_for_load(page):
        is_busy = "() => pool.blocks.filter(block => block.users).length > 140 && chart.steps.every(step => step.sequences > 1) && samples.length > 1"
        while not page.evaluate(is_busy):
            page.wait_for_timeout(100)

    tools = open_page(viewport={"width": 760, "height": 800})
    converse(tools, "What is the capital of France?")
    tools.get_by_text("Settings").click()
    tools.get_by_label("Tools").fill(json.dumps(TOOLS))
    tools.get_by_text("Settings").click()
    tools.route("**/v1/chat/completions", reply_with_call)
    converse(tools, "What is 7 + 5?")
    tools.get_by_text("Reasoning").click()
    tools.get_by_label("Result of add").fill("12")
    tools.screenshot(path=folder / "page-chat.png")
    # Samples with common prompts, and more sequences than run at a time.
    requests = [("Cow", 6, 6), ("Dog", 4, 9), ("Dog", 1, 11), ("Cat", 4, 3), ("Hen", 3, 7), ("Fox", 1, 5), ("Owl", 1, 3), ("Pig", 6, 4)]
    bodies = [{"prompt": f"{animal}. {page_support.PROMPT * length}", "n": n, "max_tokens": 120 + 20 * length} for animal, n, length in requests]
    for scheme in ("light", "dark"):
        page = open_page(viewport={"width": 1280, "height": 860}, color_scheme=scheme)
        converse(page, "Tell me a story about a dog.")
        converse(page, "What is 7 + 5?")
        with Load(server, *bodies):
            wait_for_load(page)
            if scheme == "dark":
                page.locator("#sequences button").nth(2).focus()
                page.keyboard.press("Enter")
                page.locator("#engine").evaluate("view => { view.scrollTop = 0; }")
            page.screenshot(path=folder / f"page-{scheme}.png")
    page = open_page(**{**PHONE, "viewport": {"width": 390, "height": 844}, "device_scale_factor": 1.5})
    page.get_by_role("tab", name="Engine").tap()
    with Load(server, *bodies):
        wait_for_load(page)
        page.screenshot(path=folder / "page-phone.png")


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("program")
    parser.add_argument("--screenshots", type=pathlib.Path)
    arguments, tests = parser.parse_known_args()
    hostile.program = arguments.program
    if not arguments.screenshots:
        return unittest.main(argv=[sys.argv[0], *tests])
    server = hostile.Server("-kv-bytes", "16MiB", "-max-seqs", "24", keys="")
    try:
        with sync_playwright() as playwright:
            expect.set_options(timeout=TIMEOUT)
            take_screenshots(launch(playwright), server, arguments.screenshots)
    finally:
        server.stop()


if __name__ == "__main__":
    main()
