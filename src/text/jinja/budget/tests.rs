//! What renderings may take, measured: memory with an allocator that counts, work with the budget's steps.

use super::super::failure::{Failure, Kind};
use super::super::goldens::on_deep_stack;
use super::super::interpreter::Interpreter;
use super::super::{MAX_STEPS, parse};
use crate::sys::counting::peak_of;

struct Cost {
    result: Result<String, Failure>,
    steps: u64,
    /// The most bytes that were allocated at a time.
    peak: usize,
}

fn cost(template: &str) -> Cost {
    let tree = parse(template).unwrap_or_else(|e| panic!("{template}: {e}"));
    let mut steps = 0;
    let (result, peak) = peak_of(|| {
        let interpreter = Interpreter::new(&tree, [])?;
        let budget = interpreter.budget();
        let result = interpreter.render();
        steps = budget.steps.get();
        result
    });
    Cost { result, steps, peak }
}

/// Fails unless the template ends in an error of this kind that contains `reason`, with at most `bytes` at a time.
#[track_caller]
fn refused(template: &str, kind: Kind, reason: &str, bytes: usize) {
    let cost = cost(template);
    let error = cost.result.expect_err(template);
    assert!(error.kind == kind && error.message.contains(reason), "{template}: {error}");
    assert!(cost.peak <= bytes, "{template}: {} bytes", cost.peak);
}

#[test]
fn large_widths_and_precisions_are_refused_before_they_take_memory() {
    let widths = [
        "{{ '%268000000s' % 1 }}",
        "{{ '%-268000000d' % 1 }}",
        "{{ '%*d' % (268000000, 1) }}",
        "{{ '%*d' % (-268000000, 1) }}",
        "{{ '%*d' % (-(2 ** 126) * 2, 1) }}",
        "{{ '{:>268000000}'.format(1) }}",
        "{{ '{:0268000000,d}'.format(1) }}",
        "{{ '{:{}}'.format('a', 268000000) }}",
        "{{ 'a'.ljust(268000000) }}",
        "{{ 'a'.rjust(268000000) }}",
        "{{ 'a'.center(268000000) }}",
        "{{ 'a'.zfill(268000000) }}",
        "{{ '\\t'.expandtabs(268000000) }}",
        "{{ 'a'|center(268000000) }}",
        "{{ 'a'|indent(268000000) }}",
        "{{ [1]|tojson(indent=268000000) }}",
    ];
    let precisions =
        ["{{ '%.200000000f' % 1 }}", "{{ '%.200000000d' % 1 }}", "{{ '{:.200000000f}'.format(1.5) }}", "{{ '{:.200000000}'.format(1.5) }}"];
    on_deep_stack(|| {
        widths.iter().for_each(|template| refused(template, Kind::Limit, "at most 1048576", 100_000));
        precisions.iter().for_each(|template| refused(template, Kind::Template, "at most 1100", 100_000));
        refused("{{ '{:1048576}{:1048577}'.format(1, 2) }}", Kind::Limit, "(1048577, at most 1048576)", 8 << 20);
    });
}

#[test]
fn comparing_methods_of_values_that_share_parts_is_charged() {
    let grow = "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}";
    on_deep_stack(|| {
        for comparison in ["ns.x.count == ns.y.count", "ns.x.count in [ns.y.count]", "{ns.x.count: 1}"] {
            refused(&format!("{grow}{{{{ {comparison} }}}}"), Kind::Limit, "steps", 1 << 20);
        }
    });
}

#[test]
fn searching_many_variables_is_charged() {
    let sets: String = (0..900).map(|i| format!("{{% set a{i} = 1 %}}")).collect();
    on_deep_stack(|| {
        let few = cost("{% for i in range(1000) %}{{ unknown }}{% endfor %}").steps;
        let many = cost(&format!("{sets}{{% for i in range(1000) %}}{{{{ unknown }}}}{{% endfor %}}")).steps;
        assert!(many > few + 1000 * 900 / 16 && many < MAX_STEPS, "{many} steps instead of {few}");
    });
}
