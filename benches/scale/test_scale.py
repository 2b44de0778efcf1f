"""Tests of the model of docs/scale.md: `python3 -m unittest discover -s benches/scale`."""

import contextlib
import io
import json
import re
import unittest
from dataclasses import replace
from unittest import mock

import collectives
import drawing
import layouts
import machine
import measured
import model
import scale
import step
import tables
from step import Layout, capacity, decode, prefill

BATCH = measured.ROOT / "src" / "types" / "batch" / "mod.rs"
# Parameters in billions, as published, and those that a token uses.
PUBLISHED = {
    "opt-66b": (66, 66),
    "opt-175b": (175, 175),
    "llama-3-8b": (8.03, 7.50),
    "llama-3-70b": (70.55, 69.5),
    "llama-3.1-405b": (405.85, 403.7),
    "deepseek-v3": (671, 37),
}
FREE = {
    "step": 0.0,
    "layer": 0.0,
    "expert_layer": 0.0,
    "sequence_layer": 0.0,
    "link_latency": 0.0,
    "network_latency": 0.0,
}


def ideal(**changes):
    """An H100 without any time that is neither reading nor computing nor sending."""
    return replace(machine.load("h100"), **{**FREE, **changes})


class Sizes(unittest.TestCase):
    def test_models_have_the_published_parameters(self):
        for name, (total, active) in PUBLISHED.items():
            sizes = model.load(name)
            self.assertAlmostEqual(sizes.total() / 1e9 / total, 1, delta=0.01, msg=name)
            # 36.6 billion are published as 37.
            self.assertAlmostEqual(sizes.active() / 1e9 / active, 1, delta=0.011, msg=name)

    def test_latents_are_small(self):
        self.assertEqual(model.load("deepseek-v3").kv_numbers(), 61 * 576)
        self.assertEqual(model.load("llama-3-70b").kv_numbers(), 80 * 2 * 8 * 128)

    def test_unknown_names_are_refused_with_the_remedy(self):
        with self.assertRaisesRegex(
            ValueError, "model gpt-5 is unknown; add benches/scale/models/gpt-5.json"
        ):
            model.load("gpt-5")
        with self.assertRaisesRegex(ValueError, "machine tpu is unknown; use one of a100-40gb"):
            machine.load("tpu")

    def test_machines_have_the_data_sheets_of_the_simulator(self):
        for name in tables.MACHINES:
            sheet = json.loads((machine.DEVICES / f"{name}.json").read_text())
            loaded = machine.load(name)
            self.assertEqual(loaded.memory, sheet["memory_bytes"])
            self.assertEqual(loaded.bandwidth, 0.8 * sheet["memory_bandwidth"])
            self.assertTrue(machine.DATA["machines"][name]["source"])


class Collectives(unittest.TestCase):
    def setUp(self):
        self.h100 = machine.load("h100")

    def test_one_device_sends_nothing(self):
        for send in (
            collectives.ordered_sum,
            collectives.gathered_sum,
            collectives.to_all,
            collectives.broadcast,
        ):
            self.assertEqual(send(self.h100, 1, 1e6), 0)
        for name in PUBLISHED:
            sizes = model.load(name)
            self.assertEqual(decode(sizes, self.h100, Layout(), 8, 512).parts.communication, 0)
            self.assertEqual(prefill(sizes, self.h100, Layout(), 512).parts.communication, 0)

    def test_an_ordered_sum_sends_the_bytes_of_a_ring(self):
        for devices in (2, 4, 8):
            size = 1e6
            ring = 2 * (devices - 1) / devices * size / self.h100.link
            self.assertAlmostEqual(
                collectives.ordered_sum(self.h100, devices, size), 2 * self.h100.link_latency + ring
            )
            gathered = (devices - 1) * size / self.h100.link
            self.assertAlmostEqual(
                collectives.gathered_sum(self.h100, devices, size),
                self.h100.link_latency + gathered,
            )

    def test_the_limit_separates_the_two_sums(self):
        for devices in (3, 4, 8):
            limit = collectives.gathered_sum_limit(self.h100, devices)
            for size, is_faster in ((0.99 * limit, True), (1.01 * limit, False)):
                gathered = collectives.gathered_sum(self.h100, devices, size)
                self.assertEqual(
                    gathered < collectives.ordered_sum(self.h100, devices, size), is_faster
                )
        # Two devices exchange the same bytes in both forms, in one phase less.
        self.assertEqual(collectives.gathered_sum_limit(self.h100, 2), float("inf"))

    def test_the_slower_link_of_two_nodes_decides(self):
        size = 1e8
        in_one, in_two = (collectives.ordered_sum(self.h100, devices, size) for devices in (8, 16))
        self.assertGreater(in_two, 4 * in_one)
        # A phase sends each of 8 devices of the other node a sixteenth.
        self.assertAlmostEqual(in_two, 2 * (10e-6 + 8 * size / 16 / self.h100.network))

    def test_a_broadcast_takes_a_phase_for_each_doubling_of_nodes(self):
        times = [collectives.broadcast(self.h100, devices, 1e6) for devices in (8, 16, 32, 64)]
        steps = [later - earlier for earlier, later in zip(times, times[1:])]
        for difference in steps:
            self.assertAlmostEqual(difference, 10e-6 + 1e6 / self.h100.network)


class Steps(unittest.TestCase):
    def test_twice_the_bandwidth_halves_a_step_that_reads(self):
        for name in PUBLISHED:
            # Attention to latents is limited by operations.
            sizes, slow = model.load(name), ideal(flops=1e30)
            fast = replace(slow, bandwidth=2 * slow.bandwidth)
            before, after = (
                decode(sizes, device, Layout(), 1, 2048).seconds for device in (slow, fast)
            )
            self.assertAlmostEqual(before / after, 2, places=6, msg=name)

    def test_twice_the_operations_halve_a_long_prompt(self):
        llama, fast = model.load("llama-3-70b"), ideal(flops=2 * ideal().flops)
        before, after = (
            prefill(llama, device, Layout(), 8192).seconds for device in (ideal(), fast)
        )
        self.assertAlmostEqual(before / after, 2, places=2)

    def test_free_links_divide_a_step_by_the_devices(self):
        llama, free = model.load("llama-3-70b"), ideal(link=1e30, network=1e30)
        one, eight = (
            decode(llama, free, Layout(tensor=tensor), 16, 4096).seconds for tensor in (1, 8)
        )
        self.assertAlmostEqual(one / eight, 8, places=6)

    def test_a_step_reads_each_weight_once(self):
        llama = model.load("llama-3-70b")
        weights = 2 * (llama.total() - llama.table)
        self.assertAlmostEqual(
            decode(llama, ideal(), Layout(), 1, 0).seconds * ideal().bandwidth / weights, 1
        )

    def test_a_step_reads_the_experts_that_its_tokens_select(self):
        deepseek = model.load("deepseek-v3", 1.0)

        def read(tokens):
            work = step.Work(tokens, tokens, 0, 0, tokens, tokens, True)
            seconds, sent = step.expert_time(deepseek, ideal(flops_8bit=1e30), Layout(), work)
            self.assertEqual(sent, 0)
            return seconds * ideal().bandwidth / deepseek.experts.size - 1 - 256 / 2048 / 3

        self.assertAlmostEqual(read(1), 8)
        self.assertAlmostEqual(read(2), 8 + 8 * 248 / 256)
        self.assertAlmostEqual(read(10_000), 256)

    def test_a_device_has_at_least_one_kv_head(self):
        llama, deepseek = model.load("llama-3-70b"), model.load("deepseek-v3", 1.0)
        eight, sixteen = (step.kv_bytes(llama, Layout(tensor=tensor)) for tensor in (8, 16))
        self.assertEqual(eight, 2 * 2 * 128)
        self.assertEqual(sixteen, eight)
        # Tensor parallel devices all store the latents.
        self.assertEqual(
            step.kv_bytes(deepseek, Layout(tensor=8)), step.kv_bytes(deepseek, Layout())
        )

    def test_a_plan_has_the_fields_of_a_batch(self):
        text = BATCH.read_text()
        fields = re.findall(
            r"pub (\w+): (?:Vec<)?(\w+)", re.search(r"pub struct Batch \{(.*?)\n\}", text, re.S)[1]
        )
        sizes = {"u32": 4, "Span": 12, "BlockCopy": 8, "Placeholder": 8}
        for name in ("Span", "BlockCopy", "Placeholder"):
            numbers = re.search(rf"pub struct {name} \{{(.*?)\n\}}", text, re.S)[1].count(": u32")
            self.assertEqual(sizes[name], 4 * numbers, name)
        of_token, of_sequence = ["tokens", "positions", "slots"], [
            "spans",
            "logit_rows",
            "placeholders",
        ]
        # A decode step copies no blocks, except for the first token after a fork.
        self.assertEqual(
            {name for name, _ in fields}, {*of_token, *of_sequence, "tables", "copies"}
        )
        each = dict(fields)
        expected = (
            sum(sizes[each[name]] for name in of_token + of_sequence) + 256 * sizes[each["tables"]]
        )
        self.assertEqual(step.plan_bytes(1, 1, 4096), expected)


class Pipelines(unittest.TestCase):
    def test_stages_have_all_layers_and_weights_once(self):
        for name in PUBLISHED:
            sizes = model.load(name)
            for count in (1, 2, 4, 7, 32):
                layout = Layout(pipeline=count)
                divided = step.stages(sizes, layout)
                self.assertEqual(sum(stage.layers for stage in divided), sizes.layers)
                self.assertEqual(sum(stage.plain for stage in divided), sizes.plain_layers)
                self.assertLessEqual(
                    max(s.layers for s in divided) - min(s.layers for s in divided), 1
                )
                weights = sum(step.weight_bytes(sizes, layout, stage) for stage in divided)
                # The last stage needs the table too, even if the model has it once.
                again = 2 * sizes.table if sizes.tied and count > 1 else 0
                self.assertAlmostEqual(weights / (2 * sizes.total() + again), 1)

    def test_one_sequence_is_not_faster_with_more_stages(self):
        llama, h100 = model.load("llama-3-70b"), machine.load("h100")
        times = [decode(llama, h100, Layout(8, stages), 1, 4096).seconds for stages in (1, 2, 4, 8)]
        self.assertEqual(times, sorted(times))

    def test_as_many_sequences_as_stages_leave_no_stage_waiting(self):
        # Without the head, which only the last stage has.
        llama = replace(model.load("llama-3-70b"), vocab=1)
        for stages in (2, 4, 8):
            one, all_of_them = (
                decode(llama, ideal(), Layout(8, stages), count, 4096) for count in (1, stages)
            )
            self.assertAlmostEqual(all_of_them.rate / one.rate / stages, 1, delta=0.01)

    def test_a_prompt_in_chunks_waits_for_the_bubble(self):
        llama, free = replace(model.load("llama-3-70b"), vocab=1), ideal(
            bandwidth=1e30, link=1e30, network=1e30
        )
        one = prefill(llama, free, Layout(), 8192).seconds
        for stages in (2, 4, 8):
            chunks = 64
            waiting = (stages - 1) / (chunks + stages - 1)
            self.assertAlmostEqual(
                prefill(llama, free, Layout(pipeline=stages), 8192).seconds,
                one / stages / (1 - waiting),
                delta=1e-6,
            )

    def test_hidden_states_cross_the_network_only_between_nodes(self):
        llama, h100 = model.load("llama-3-70b"), machine.load("h100")
        work = step.Work(64, 64, 0, 0, 64, 64, True)
        times = [step.hop(llama, h100, Layout(4, 4), stage, work) for stage in range(3)]
        self.assertEqual(times[0], times[2])
        self.assertGreater(times[1], times[0])


class Memory(unittest.TestCase):
    def test_pools_are_those_of_the_simulator(self):
        _, rows = measured.evaluation()
        self.assertEqual(len(rows), 2)
        for row in rows:
            self.assertAlmostEqual(row["slots"] / row["simulated_slots"], 1, delta=0.005)
            self.assertAlmostEqual(row["slots"] / row["paper_slots"], 1, delta=0.06)

    def test_weights_that_do_not_fit_leave_no_layout(self):
        llama, h100 = model.load("llama-3-70b"), machine.load("h100")
        self.assertLess(capacity(llama, h100, Layout()), 0)
        self.assertIsNone(layouts.fastest(llama, h100, 1, 512))
        self.assertIsNone(layouts.largest_rate(llama, h100, 1, 512, 1.0))
        self.assertEqual(layouts.most_sequences(llama, h100, Layout(), 512, 1.0), 0)

    def test_latents_of_all_sequences_are_divided_with_expert_parallelism_only(self):
        deepseek, h200 = model.load("deepseek-v3", 1.0), machine.load("h200")
        tensor, experts = (
            capacity(deepseek, h200, layout) for layout in (Layout(tensor=8), Layout(data=8))
        )
        self.assertGreater(experts, 5 * tensor)


class Search(unittest.TestCase):
    def test_layouts_use_all_devices_and_divide_the_model(self):
        deepseek, h100 = model.load("deepseek-v3", 1.0), machine.load("h100")
        for devices in tables.DEVICES:
            found = layouts.layouts(deepseek, h100, devices)
            self.assertEqual({layout.devices for layout in found}, {devices})
            self.assertTrue(all(layout.tensor <= 8 and layout.pipeline <= 61 for layout in found))
            self.assertEqual(len(set(found)), len(found))
        self.assertIn(Layout(tensor=16), layouts.layouts(deepseek, h100, 16, across_nodes=True))
        # 72 heads do not divide by 16.
        self.assertNotIn(
            Layout(tensor=16), layouts.layouts(model.load("opt-66b"), h100, 16, across_nodes=True)
        )

    def test_sequences_are_the_most_within_memory_and_time(self):
        llama, h100 = model.load("llama-3-70b"), machine.load("h100")
        for layout, limit in (
            (Layout(4), 0.05),
            (Layout(8), 0.05),
            (Layout(4, 4), 0.05),
            (Layout(4, 2), 0.03),
        ):
            sequences = layouts.most_sequences(llama, h100, layout, 4096, limit)
            self.assertLessEqual(sequences * 4096, capacity(llama, h100, layout))
            self.assertLessEqual(decode(llama, h100, layout, sequences, 4096).seconds, limit)
            more = sequences + layout.pipeline
            fits = more * 4096 <= capacity(llama, h100, layout)
            self.assertFalse(
                fits and decode(llama, h100, layout, more, 4096).seconds <= limit, layout
            )


class Measured(unittest.TestCase):
    def test_steps_on_an_h100_are_those_of_the_results(self):
        rows = measured.gpu_steps()
        self.assertEqual(len(rows), 12)
        for what, ours, theirs in rows:
            self.assertAlmostEqual(theirs / ours, 1, delta=0.07, msg=what)

    def test_products_in_fp8_reach_the_measured_share(self):
        kernels = machine.DATA["kernels"]
        ratio = measured.products_share("fp8") / measured.products_share("bf16")
        self.assertAlmostEqual(
            kernels["flops_8bit_share"] / kernels["flops_share"], ratio, delta=0.02
        )

    def test_exchanges_between_nodes_are_those_of_deepep(self):
        for devices, there, our_there, back, our_back in measured.expert_exchanges():
            if devices > 8:
                self.assertAlmostEqual(our_there / there, 1, delta=0.12, msg=devices)
                self.assertAlmostEqual(our_back / back, 1, delta=0.06, msg=devices)


class Page(unittest.TestCase):
    """The statements of docs/scale.md that have numbers."""

    def best(self, name, device, devices):
        m, k, context, limit = tables.bound(name, device)
        return layouts.largest_rate(m, k, devices, context, limit)

    def one(self, name, device, devices):
        m, k, context, _ = tables.bound(name, device)
        return layouts.fastest(m, k, devices, context)[1]

    def test_two_more_devices_make_room_for_twelve_times_the_tokens(self):
        m, k, _, _ = tables.bound("llama-3-70b", "h100")
        tokens = [round(capacity(m, k, Layout(tensor=tensor)) / 1e3) for tensor in (2, 4)]
        self.assertEqual(tokens, [41, 513])
        two, four = (
            self.best("llama-3-70b", "h100", devices)[2].rate / devices for devices in (2, 4)
        )
        self.assertAlmostEqual(four / two, 5.4, delta=0.1)

    def test_doubling_the_devices_of_a_node_shortens_a_token(self):
        for name, device, counts in (
            ("opt-66b", "a100-40gb", (4, 8)),
            ("llama-3-70b", "h100", (2, 4, 8)),
            ("llama-3-70b", "h200", (2, 4, 8)),
        ):
            times = [self.one(name, device, devices).seconds for devices in counts]
            for earlier, later in zip(times, times[1:]):
                self.assertTrue(0.545 <= later / earlier <= 0.65, (name, later / earlier))
        parts = self.one("llama-3-70b", "h100", 8).parts
        self.assertAlmostEqual(
            (parts.fixed + parts.communication) / parts.total(), 1 / 3, delta=0.02
        )

    def test_tensor_parallelism_across_nodes_helps_one_sequence_only(self):
        m, k, context, _ = tables.bound("llama-3.1-405b", "h100")
        times = [
            [
                1e3 * decode(m, k, layout, count, context).seconds
                for layout in (Layout(8, 2), Layout(16))
            ]
            for count in (1, 64)
        ]
        self.assertEqual([[round(time) for time in row] for row in times], [[43, 27], [50, 62]])

    def test_more_stages_bring_the_first_token_sooner(self):
        m, k, context, _ = tables.bound("llama-3-70b", "h100")
        eight, all_of_them = (
            layouts.fastest_prompt(m, k, devices, context)[1].seconds for devices in (8, 64)
        )
        self.assertAlmostEqual(eight / all_of_them, 3.7, delta=0.05)

    def test_the_rate_of_a_device_stops_growing(self):
        for device, best in (("h100", (8, 16)), ("h200", (4,))):
            rates = {
                devices: self.best("llama-3-70b", device, devices)[2].rate / devices
                for devices in tables.DEVICES[1:]
            }
            within = [
                devices for devices, rate in rates.items() if rate > 0.99 * max(rates.values())
            ]
            self.assertEqual(tuple(devices for devices in within if devices in best), best)
            self.assertLess(rates[64], rates[best[-1]])

    def test_expert_parallelism_suits_many_sequences(self):
        m, k, context, limit = tables.bound("deepseek-v3", "h200")
        tensor, experts = Layout(8, 2), Layout(data=16)
        self.assertAlmostEqual(capacity(m, k, experts) / capacity(m, k, tensor), 6.5, delta=0.05)
        rates = [
            decode(m, k, layout, layouts.most_sequences(m, k, layout, context, limit), context).rate
            for layout in (tensor, experts)
        ]
        self.assertAlmostEqual(rates[1] / rates[0], 4.1, delta=0.05)
        ones = [
            round(1e3 * decode(m, k, layout, 1, context).seconds, 1) for layout in (tensor, experts)
        ]
        self.assertEqual(ones, [5.3, 8.7])

    def test_exchanges_of_experts_between_nodes_take_a_large_share(self):
        found = [
            self.best("deepseek-v3", device, devices)
            for device in ("h100", "h200")
            for devices in (16, 32, 64)
        ]
        across = [round(100 * best[2].communication_share()) for best in found if best[0].data > 8]
        self.assertEqual((min(across), max(across)), (21, 42))

    def test_the_gathered_sum_is_faster_for_ten_tokens(self):
        llama, h100 = model.load("llama-3-70b"), machine.load("h100")
        of_token = step.SUM_BYTES * llama.hidden
        self.assertEqual(int(collectives.gathered_sum_limit(h100, 8) / of_token), 10)
        gathered, ordered = (
            form(h100, 8, 64 * of_token)
            for form in (collectives.gathered_sum, collectives.ordered_sum)
        )
        self.assertGreater(gathered, 2 * ordered)

    def test_the_service_of_deepseek_is_a_little_faster_than_the_model(self):
        sequences, ms, rate, share = measured.served()
        self.assertEqual(
            (sequences, round(ms), round(rate, -1), round(100 * share)), (88, 54, 1630, 45)
        )

    def test_batch_invariant_steps_are_slower_as_measured(self):
        line = r"^batch ({}), 32 layers, {} +([\d.]+) ms"
        ratios = []
        for batch in (1, 256):
            modes = ("batch_invariant", "default")
            (_, slow), (_, fast) = (
                measured.numbers_of(line.format(batch, mode))[0] for mode in modes
            )
            ratios.append(slow / fast)
        self.assertAlmostEqual(ratios[0], 1.16, delta=0.005)
        self.assertAlmostEqual(ratios[1], 2.3, delta=0.05)

    def test_the_text_has_the_context_of_the_measurements(self):
        self.assertEqual(measured.CONTEXT, 560)
        self.assertEqual(round(measured.evaluation()[0]), 501)


class Report(unittest.TestCase):
    def test_a_changed_number_makes_the_page_stale(self):
        page = scale.PAGE.read_text()
        self.assertEqual(scale.filled(page), page)
        changed = page.replace("| 8 | TP 4 x PP 2 |", "| 8 | TP 2 x PP 4 |")
        self.assertNotEqual(changed, page)
        self.assertEqual(scale.filled(changed), page)

    def test_a_missing_table_is_an_error(self):
        page = scale.PAGE.read_text().replace("<!-- table: sums -->", "")
        with self.assertRaisesRegex(AssertionError, "sums"):
            scale.filled(page)

    def test_the_plot_has_the_numbers_of_the_page(self):
        self.assertFalse(drawing.is_stale())
        with mock.patch.object(drawing, "DEVICES", (1, 2, 4)):
            self.assertTrue(drawing.is_stale())

    def test_a_case_of_the_command_line_has_its_layouts(self):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            scale.main(
                ["--model", "llama-3.1-405b", "--machine", "h100", "--devices", "8", "--fp8"]
            )
        self.assertIn("| TP 8 |", output.getvalue())

    def test_a_case_that_is_impossible_is_refused_with_the_remedy(self):
        for arguments, problem in (
            (
                ["--devices", "8"],
                r"does not fit into --devices 8 \(812 GB of weights, 618 GB of memory, 4096 tokens\); raise --devices or pass --fp8",
            ),
            (["--devices", "0"], "--devices is 0; must be at least 1"),
            (["--context", "0"], "--context is 0; must be at least 1"),
            (["--limit-ms", "0"], "--limit-ms is 0; must be at least 0.1"),
        ):
            with self.assertRaisesRegex(ValueError, problem):
                scale.main(["--model", "llama-3.1-405b", *arguments])


if __name__ == "__main__":
    unittest.main()
