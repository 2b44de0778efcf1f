//! Measures the costs of renderings: memory with a counting allocator, work with the budget's
//! steps.

use super::super::context::Context;
use super::super::failure::{Failure, Kind};
use super::super::goldens::on_deep_stack;
use super::super::interpreter::Interpreter;
use super::super::{MAX_STEPS, MAX_VALUE_BYTES, filters, methods, parse, tests};
use crate::sys::counting::peak_of;

struct Cost {
    result: Result<String, Failure>,
    steps: u64,
    /// The maximum of the allocated bytes, and of the bytes that the budget counted.
    peak: usize,
    counted: usize,
}

fn cost(template: &str) -> Cost {
    let tree = parse(template).unwrap_or_else(|e| panic!("{template}: {e}"));
    let (mut steps, mut counted) = (0, 0);
    let (result, peak) = peak_of(|| {
        let interpreter = Interpreter::new(&tree, [])?;
        let budget = interpreter.budget();
        let result = interpreter.render();
        (steps, counted) = (budget.steps.get(), budget.peak.get());
        result
    });
    Cost { result, steps, peak, counted }
}

/// Fails unless the template ends in an error of this kind that contains `reason`, with at most
/// `bytes` at a time.
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
    let grow = "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(70) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}";
    on_deep_stack(|| {
        for comparison in ["ns.x.count == ns.y.count", "ns.x.count in [ns.y.count]", "{ns.x.count: 1}"] {
            refused(&format!("{grow}{{{{ {comparison} }}}}"), Kind::Limit, "steps", 1 << 20);
        }
    });
}

#[test]
fn looking_for_white_space_again_is_charged() {
    // The long word begins with no-break spaces, and each line consumes one of them.
    let template = |n: usize| format!("{{{{ ('a ' ~ '\u{a0}' * {n} ~ 'x')|wordwrap(1)|length }}}}");
    on_deep_stack(|| {
        let few = cost(&template(2_000)).steps;
        let many = cost(&template(4_000)).steps;
        assert!(many > 3 * few, "{many} steps instead of {few}");
        refused(&template(1_000_000), Kind::Limit, "steps", 100 << 20);
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

/// Expressions on the strings a and b, the lists p and q and the dictionaries m and n, with the
/// variables whose size each expression must charge alone. Variables joined by `&` are compared, so
/// only the smaller one counts.
const EXPRESSIONS: &[(&str, &str)] = &[
    ("a + b", "ab"),
    ("a ~ b", "ab"),
    ("a|e + b", "ab"),
    ("a % b", "a"),
    ("'%s%s' % (a, b)", "ab"),
    ("'%r' % a", "a"),
    ("'%a' % a", "a"),
    ("'%.5s' % a", "a"),
    ("'%(x)s' % {'x': a}", "a"),
    ("a|e % (b, q)", "ab"),
    ("a * 2", "a"),
    ("p * 2", "p"),
    ("p + q", "pq"),
    ("(p + q)|join", "pq"),
    ("p|first - 1", ""),
    ("1 / 2 + 7 // 2 - 2 ** 3", ""),
    ("a == b", "&ab"),
    ("a != b", "&ab"),
    ("a < b", "&ab"),
    ("a <= b", "&ab"),
    ("a > b", "&ab"),
    ("a >= b", "&ab"),
    ("p == q", "&pq"),
    ("p < q", "&pq"),
    ("m == n", "&mn"),
    ("m.items() == n.items()", "&mn"),
    ("m.keys() == n.keys()", "&mn"),
    ("a in b", "ab"),
    ("a not in b", "ab"),
    ("a in [b]", "&ab"),
    ("-1 in p", "p"),
    ("-1 in m.values()", "m"),
    ("a in m", "a"),
    ("{a: b}", "a"),
    ("{a: 1}[b]", "ab"),
    ("m[a]", "a"),
    ("a[1:]", "a"),
    ("a[::-1]", "a"),
    ("a[-1]", "a"),
    ("p[1:]", "p"),
    ("[p, q]", ""),
    ("[1].count(*p)", "p"),
    ("cycler(*p)", "p"),
    ("dict(m)", "m"),
    ("dict(p|map('batch', 2)|first)", ""),
    ("dict(m.items())", "m"),
    ("namespace(m)", "m"),
    ("joiner(a)", ""),
    ("range(p|length)|list", "p"),
    ("raise_exception(a)", "a"),
    ("strftime_now(a)", ""),
    ("strftime_now('%999d' * 9999)", ""),
    ("'{:01000000,}'.format(1)", ""),
    // Methods.
    ("a.capitalize()", "a"),
    ("a.casefold()", "a"),
    ("a.center(150000)", "a"),
    ("a.count(b)", "ab"),
    ("a.endswith(b)", "ab"),
    ("a.endswith((b, b))", "ab"),
    ("a.expandtabs()", "a"),
    ("a.find(b)", "ab"),
    ("a.format(b)", "ab"),
    ("'{}{:>10}{!r:.3}'.format(a, b, b)", "ab"),
    ("a.format_map({'x': b})", "a"),
    ("'{x}{x}'.format_map({'x': b})", "b"),
    ("a.index(b)", "ab"),
    ("a.isalnum()", "a"),
    ("a.isalpha()", "a"),
    ("a.isascii()", "a"),
    ("a.isdecimal()", "a"),
    ("a.isdigit()", "a"),
    ("a.isidentifier()", "a"),
    ("a.islower()", "a"),
    ("a.isnumeric()", "a"),
    ("a.isprintable()", "a"),
    ("a.isspace()", "a"),
    ("a.istitle()", "a"),
    ("a.isupper()", "a"),
    ("a.join([b, b])", "ab"),
    ("a.join([])", "a"),
    ("','.join(p|map('string'))", "p"),
    ("(a|e).join([b, b])", "ab"),
    ("a.ljust(150000)", "a"),
    ("a.lower()", "a"),
    ("a.lstrip(b)", "ab"),
    ("a.partition(b)", "ab"),
    ("a.removeprefix(b)", "ab"),
    ("a.removesuffix(b)", "ab"),
    ("a.replace(b, a)", "ab"),
    ("a.replace('x', 'yyy')", "a"),
    ("(a|e).replace(b, b)", "ab"),
    ("a.rfind(b)", "ab"),
    ("a.rindex(b)", "ab"),
    ("a.rjust(150000)", "a"),
    ("a.rpartition(b)", "ab"),
    ("a.rsplit('x')", "a"),
    ("a.rsplit(b)", "ab"),
    ("(a|replace('x', ' ')).rsplit()", "a"),
    ("a.rstrip(b)", "ab"),
    ("a.split('x')", "a"),
    ("a.split(b)", "ab"),
    ("(a|replace('x', ' ')).split()", "a"),
    ("(a|e).split('x')", "a"),
    ("(a|replace('x', '\n')).splitlines()", "a"),
    ("a.startswith(b)", "ab"),
    ("a.strip(b)", "ab"),
    ("a.swapcase()", "a"),
    ("a.title()", "a"),
    ("a.translate({120: 'zz', 121: 65})", "a"),
    ("a.upper()", "a"),
    ("('\u{390}' * a|length).upper()", "a"),
    ("a.zfill(150000)", "a"),
    ("p.copy()", "p"),
    ("p.count(-1)", "p"),
    ("[b, a].count(a)", "&ab"),
    ("p.index(-1)", "p"),
    ("range(p|length).index(-1)", "p"),
    ("range(p|length).count(-1)", "p"),
    ("m.copy()", ""),
    ("m.fromkeys(p, b)", "p"),
    ("m.get(a)", "a"),
    ("m.items()|list", "m"),
    ("m.keys()|list", "m"),
    ("m.values()|list", "m"),
    ("m.keys().isdisjoint(p|reject)", ""),
    ("{-1: 1}.keys().isdisjoint(p)", "p"),
    ("1.bit_count() + 1.bit_length() + 1.conjugate() + 1.5.is_integer()", ""),
    ("cycler(p).next() or cycler(p).reset()", ""),
    // Filters.
    ("1|abs + 1.5|round + (1|filesizeformat)|length", ""),
    ("a|attr(b)", "ab"),
    ("p|batch(3, b)|list", "p"),
    ("[1]|batch(10000)|list", ""),
    ("[1]|batch(10000, 0)|list", ""),
    ("a|capitalize", "a"),
    ("a|center(150000)", "a"),
    ("a|count", "a"),
    ("none|d(a) or none|default(a)", "a"),
    ("m|dictsort", "m"),
    ("m|dictsort(by='value', reverse=true)", "m"),
    ("a|e", "a"),
    ("a|escape", "a"),
    ("a|forceescape", "a"),
    ("p|first", ""),
    ("a|float", "a"),
    ("a|int", "a"),
    ("a|format(b)", "ab"),
    ("'%s'|format(b)", "b"),
    ("p|groupby('real')", "p"),
    ("a|indent(4)", "a"),
    ("a|indent(b)", "ab"),
    ("a|replace('x', '\n')|indent(4, true, true)", "a"),
    ("m|items|list", "m"),
    ("p|join(b)", "pb"),
    ("p|join(',', attribute='real')", "p"),
    ("p|last", ""),
    ("p|length", ""),
    ("a|length", "a"),
    ("p|list", "p"),
    ("a|list", "a"),
    ("a|lower", "a"),
    ("p|map('string')|list", "p"),
    ("p|map(attribute='real')|list", "p"),
    ("[1, 2]|map('default', *p)|list", "p"),
    ("[1, 2]|map(a)|list", ""),
    ("[a, b]|max", "ab"),
    ("p|max", "p"),
    ("p|min", "p"),
    ("p|reject|list", "p"),
    ("p|rejectattr('real')|list", "p"),
    ("a|replace(b, a)", "ab"),
    ("a|reverse", "a"),
    ("p|reverse|list", "p"),
    ("a|safe", "a"),
    ("p|select('odd')|list", "p"),
    ("p|selectattr('real', 'even')|list", "p"),
    ("p|slice(3, b)|list", "p"),
    ("[1]|slice(10000)|list", ""),
    ("[a, b]|sort", "ab"),
    ("p|sort", "p"),
    ("p|sort(reverse=true, attribute='real,imag')", "p"),
    ("p|map('string')|sort", "p"),
    ("a|string", "a"),
    ("p|string", "p"),
    ("a|striptags", "a"),
    ("a|replace('x', ' ')|striptags", "a"),
    ("a|replace('x', '<')|striptags", "a"),
    ("p|sum", "p"),
    ("[p, q]|sum(start=[])", "pq"),
    ("a|title", "a"),
    ("a|tojson", "a"),
    ("p|tojson", "p"),
    ("p|tojson(indent=b)", "pb"),
    ("[p, 1]|tojson(separators=[b, b])", "pb"),
    ("m|tojson(indent=2, sort_keys=true)", "m"),
    ("a|trim(b)", "ab"),
    ("a|truncate(50000, end=b)", "ab"),
    ("p|unique|list", "p"),
    ("a|upper", "a"),
    ("a|urlencode", "a"),
    ("m|urlencode", "m"),
    ("{'a': a}|urlencode", "a"),
    ("a|wordcount", "a"),
    ("a|wordwrap(2)", "a"),
    ("a|replace('x', ' ')|wordwrap(1, true, b)", "ab"),
    ("a|replace('x', '-')|wordwrap(9)", "a"),
    ("{'x': a}|xmlattr", "a"),
    ("a|random or a|urlize or a|pprint", ""),
    // Tests.
    ("a is lower or a is upper", "a"),
    ("a is in b", "ab"),
    ("a is in p", "p"),
    ("[a]|select('==', b)|list", "&ab"),
    ("a is eq b or a is equalto b or a is ne b", "&ab"),
    ("a is gt b or a is greaterthan b or a is ge b", "&ab"),
    ("a is lt b or a is lessthan b or a is le b", "&ab"),
    ("[a]|select('!=', b)|list", "&ab"),
    ("[a]|select('>', b)|list", "&ab"),
    ("[a]|select('>=', b)|list", "&ab"),
    ("[a]|select('<', b)|list", "&ab"),
    ("[a]|select('<=', b)|list", "&ab"),
    ("a is sameas b", "&ab"),
    ("a is filter or a is test", "a"),
    ("1 is odd or 1 is even or 1 is divisibleby 2", ""),
    ("a is defined and a is undefined or a is none or a is boolean or a is false or a is true or a is integer", ""),
    ("a is float or a is string and a is mapping or a is number or a is sequence and a is callable", ""),
    ("a is iterable and a is escaped", ""),
];
/// Bytes of each large string; lists and dictionaries have a tenth as many elements.
const LARGE: usize = 100_000;
const NAMES: [char; 6] = ['a', 'b', 'p', 'q', 'm', 'n'];

/// Defines the variables, of which those in `large` are large.
fn variables(large: &str) -> String {
    let define = |name: char| {
        let n = if large.contains(name) { LARGE / 2 } else { 1 };
        match name {
            'a' | 'b' => format!("{{% set {name} = 'xy' * {n} %}}"),
            'p' | 'q' => format!("{{% set {name} = range(({n} / 5)|int)|list %}}"),
            _ => format!("{{% set {name} = {{}}.fromkeys(range(({n} / 5)|int), 'x') %}}"),
        }
    };
    NAMES.into_iter().map(define).collect()
}

fn steps_of(expression: &str, large: &str) -> i64 {
    let variables = variables(large);
    let without = cost(&variables);
    assert!(without.result.is_ok(), "{:?}", without.result);
    cost(&format!("{variables}{{% set result = {expression} %}}")).steps as i64 - without.steps as i64
}

#[test]
fn work_on_large_operands_is_charged() {
    on_deep_stack(|| {
        let mut wrong = Vec::new();
        for (expression, sizes) in EXPRESSIONS {
            let small = steps_of(expression, "");
            let together = sizes.strip_prefix('&');
            let cases = together.map_or_else(|| sizes.chars().map(String::from).collect(), |all| vec![all.to_string()]);
            for large in cases {
                let steps = steps_of(expression, &large) - small;
                let min_steps = if large.contains(['a', 'b']) { LARGE / 256 } else { LARGE / 10 / 8 } as i64;
                if steps < min_steps {
                    wrong.push(format!("{expression} with large {large}: {steps} steps, less than {min_steps}"));
                }
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    });
}

#[test]
fn memory_of_large_operands_is_counted() {
    on_deep_stack(|| {
        let mut wrong = Vec::new();
        for (expression, _) in EXPRESSIONS {
            let words: Vec<&str> = expression.split(|c: char| !c.is_alphanumeric()).collect();
            let used: String = NAMES.into_iter().filter(|name| words.contains(&&*name.to_string())).collect();
            let defined = variables(&used);
            let cost = cost(&format!("{defined}{{% for i in range(3) %}}{{% set result = {expression} %}}{{% endfor %}}"));
            if cost.peak > cost.counted + cost.counted / 20 + 20_000 {
                wrong.push(format!("{expression}: {} bytes, {} counted", cost.peak, cost.counted));
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    });
}

#[test]
fn memory_that_statements_keep_is_counted() {
    // Each keeps megabytes.
    let long = "y".repeat(20_000);
    let templates = [
        "{% for i in range(1000) %}{{ 'x' * 10000 }}{% endfor %}",
        "{% for i in range(1000) %}{{ i * 7 }}{% endfor %}{{ range(100000)|list }}",
        "{% set x %}{% for i in range(1000) %}{{ 'x' * 10000 }}{% endfor %}{% endset %}{{ x }}",
        "{% filter upper %}{% for i in range(1000) %}{{ 'x' * 1000 }}{% endfor %}{% endfilter %}",
        "{% macro m(x) %}{{ x }}{% if x %}{{ m(x[1:]) }}{% endif %}{% endmacro %}{{ m('x' * 900) }}",
        "{% macro m() %}{{ kwargs }}{{ varargs }}{% endmacro %}{{ m(*range(9999), **{'a': 'x' * 9999, 'b': 1}) }}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1, *varargs) }}{% endif %}{% endmacro %}{{ m(200, *range(9999)) }}",
        "{% for x in [[1] * 999] recursive %}{{ x }}{% if loop.depth < 99 %}{{ loop([x]) }}{% endif %}{% endfor %}",
        "{% for i in range(100) %}{% for j in range(100) %}{{ loop.index }}{% endfor %}{% endfor %}",
        "{% for i in range(99999) if i %}{{ loop.length if loop.first }}{% endfor %}",
        "{% for i in range(99) %}{{ loop.changed(*range(9999)) }}{% endfor %}",
        "{% for i in range(9999) %}{% set x = loop %}{% for j in [1] %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(l=()) %}{% for i in range(9999) %}{% set ns.l = (ns.l, none) %}{% if i % 99 == 0 %}{% set ns.l = () %}{% endif %}{% endfor %}",
        "{% set ns = namespace(l=[]) %}{% for i in range(999) %}{% set ns.l = ns.l + [ LONG ] %}{% endfor %}",
        "{% set ns = namespace(l=[]) %}{% for i in range(999) %}{% set ns.l = ns.l + [ns.LONG, 1['__LONG__'], 'a'.upper, [].count] %}{% endfor %}",
        "{% set ns = namespace(l=[]) %}{% for i in range(999) %}{% set ns.l = ns.l + [[]|first, []|last, []|max, 1 if 0] %}{% endfor %}",
        "{% for i in range(999) %}{% set x = [1]|map('LONG') %}{% set y = [1]|select('LONG') %}{% endfor %}",
        "{% for i in range(999) %}{% set x = [1]|map(LONG=1) %}{% set y = [1]|map(attribute='a', LONG=1) %}{% endfor %}",
        "{% for i in range(999) %}{% macro LONG() %}{% endmacro %}{% endfor %}",
        "{% for i in range(999) %}{% macro m(LONG) %}{{ LONG }}{% endmacro %}{% set x = m() %}{% endfor %}",
        "{% for i in range(9999) %}{% set a = i %}{% set b = i %}{% set c = i %}{% set d = i %}{% macro m() %}{% endmacro %}{% endfor %}",
        "{% for i in range(9999) %}{% with %}{% with %}{% with %}{% macro m() %}{% endmacro %}{% endwith %}{% endwith %}{% endwith %}{% endfor %}",
        "{% for i in range(9999) %}{% set x = cycler(1, 2) %}{% set y = joiner(i) %}{% set z = namespace(a=1, b=2, c=3, d=4) %}{% endfor %}",
        "{% for i in range(9999) %}{% set x = [1, 2]|map('string') %}{% set y = {}|items %}{% set z = [1]|reverse %}{% endfor %}",
        "{% set ns = namespace(l=[]) %}{% for i in range(999) %}{% set ns.l = ns.l + [{}, [], '', (), {1: 2}] %}{% endfor %}",
        "{% set l = [{}] %}{% for i in range(999) %}{% set x = l|map(attribute='real')|map('string')|list|map('upper')|sort|unique|list %}{% endfor %}",
    ];
    on_deep_stack(|| {
        let mut wrong = Vec::new();
        for template in templates {
            let cost = cost(&template.replace("LONG", &long));
            if cost.peak > cost.counted + cost.counted / 20 + 20_000 {
                wrong.push(format!("{template}: {} bytes, {} counted", cost.peak, cost.counted));
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    });
}

#[test]
fn rendering_takes_hardly_more_than_its_budget_of_bytes() {
    let templates = [
        "{{ ('a' * 10 ** 8).split('a')|length }}",
        "{{ (' a' * 10 ** 7).rsplit()|length }}",
        "{{ ('a\n' * 10 ** 7).splitlines()|length }}",
        "{{ ('a' * 10 ** 8)|list|length }}",
        "{{ ('a' * 10 ** 8)[::-1]|length }}",
        "{{ ('a ' * 10 ** 7)|wordwrap(1)|length }}",
        "{{ ('a ' * 10 ** 7)|striptags|length }}",
        "{{ ('\u{390}' * 10 ** 7).upper()|length }}",
        "{{ ('_' * 10 ** 8)|float }}",
        "{{ ('a' * 10 ** 8)|e + ('<' * 10 ** 7) }}",
        "{{ [1]|sort(attribute=',' * 10 ** 8) }}",
        "{{ '{:{}}'.format(1, ' ' * 10 ** 8) }}",
        "{{ '%s' % ('a' * 10 ** 8) }}{{ '%s' % ('b' * 10 ** 8) }}",
        "{{ [[1] * 10 ** 6]|map('list')|first|groupby('real')|length }}",
        "{{ ([1] * 10 ** 6)|sort|length }}",
        "{{ [1].count(*[1] * 3 * 10 ** 6) }}",
        "{{ {}.fromkeys([1] * 10 ** 6)|length }}",
        "{% for a in [1] * 10 ** 6 %}{% for b in [1] * 10 ** 6 %}{{ 'x' * 1000000 }}{% endfor %}{% endfor %}",
        "{% set ns = namespace(l=[]) %}{% for i in range(99) %}{% set ns.l = ns.l + [i, {}, unknown, 'x' * 7] + ns.l %}{% endfor %}",
    ];
    on_deep_stack(|| {
        for template in templates {
            let peak = cost(template).peak;
            assert!(peak <= MAX_VALUE_BYTES + 100_000, "{template}: {peak} bytes");
        }
    });
}

#[test]
fn each_method_filter_and_test_has_an_expression() {
    let all: String = EXPRESSIONS.iter().map(|(expression, _)| format!("{expression} ")).collect();
    let find = |expected: String| assert!(all.contains(&expected), "{expected}");
    let methods = [methods::TEXT, methods::LIST, methods::DICT, methods::KEYS, methods::INT, methods::FLOAT, methods::CYCLER].concat();
    methods.iter().for_each(|name| find(format!(".{name}(")));
    filters::NAMES.iter().for_each(|name| find(format!("|{name}")));
    let (named, symbols): (Vec<&str>, Vec<&str>) = tests::NAMES.iter().partition(|name| name.starts_with(char::is_alphabetic));
    named.iter().for_each(|name| find(format!("is {name}")));
    symbols.iter().for_each(|name| find(format!("select('{name}', b)")));
}
