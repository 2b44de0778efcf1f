//! What chat templates expect of Python: `json.dumps`, as the filter `tojson`, and `strftime`.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

type Result<T> = std::result::Result<T, Error>;

/// Lists within lists, as deep as JSON that is read may be.
const MAX_DEPTH: usize = 128;

/// Bytes of one value as JSON.
const MAX_JSON: usize = 64 << 20;

/// The filter `tojson` of transformers: `json.dumps(value, ensure_ascii, indent, separators, sort_keys)`.
/// Unlike Jinja's own it does not escape for HTML.
pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<String> {
    let indent = indent(options.get("indent")?)?;
    let default = if indent.is_some() { "," } else { ", " };
    let separators: Option<Vec<String>> = options.get("separators")?;
    let (item, key) = match separators.as_deref() {
        None => (default.to_string(), ": ".to_string()),
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(failed("tojson: separators must be two strings")),
    };
    let ascii = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sort = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    options.assert_all_used()?;
    let mut json = Json { out: String::new(), depth: 0, indent, item, key, ascii, sort };
    json.value(value)?;
    Ok(json.out)
}

/// What each level is indented with: nothing for a single line.
fn indent(option: Option<Value>) -> Result<Option<String>> {
    let Some(option) = option.filter(|option| !option.is_none()) else { return Ok(None) };
    if let Some(text) = option.as_str() {
        return Ok(Some(text.to_string()));
    }
    // Python reads a negative number as 0.
    let width = i64::try_from(option)?.max(0);
    if width > 1000 {
        return Err(failed(format!("tojson: indent is {width}, and at most 1000 is offered")));
    }
    Ok(Some(" ".repeat(width as usize)))
}

struct Json {
    out: String,
    depth: usize,
    indent: Option<String>,
    item: String,
    key: String,
    ascii: bool,
    sort: bool,
}

impl Json {
    fn value(&mut self, value: &Value) -> Result<()> {
        if self.out.len() > MAX_JSON {
            return Err(failed(format!("tojson: the value takes more than {MAX_JSON} bytes")));
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&number(value)?),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => self.list(value)?,
            ValueKind::Map => self.map(value)?,
            kind => return Err(failed(format!("tojson: a value of type {kind} is not JSON serializable"))),
        }
        Ok(())
    }

    fn list(&mut self, value: &Value) -> Result<()> {
        self.open('[')?;
        let mut empty = true;
        for item in value.try_iter()? {
            self.separate(&mut empty);
            self.value(&item)?;
        }
        self.close(']', empty);
        Ok(())
    }

    fn map(&mut self, value: &Value) -> Result<()> {
        let pairs = value.as_object().and_then(|object| object.try_iter_pairs());
        let mut pairs: Vec<(Value, Value)> = pairs.into_iter().flatten().collect();
        if self.sort {
            pairs.sort_by(|(a, _), (b, _)| a.cmp(b));
        }
        self.open('{')?;
        let mut empty = true;
        for (key, value) in &pairs {
            self.separate(&mut empty);
            self.key(key)?;
            self.out.push_str(&self.key);
            self.value(value)?;
        }
        self.close('}', empty);
        Ok(())
    }

    /// Keys are strings: others are written as one.
    fn key(&mut self, key: &Value) -> Result<()> {
        match key.kind() {
            ValueKind::String => self.string(key.as_str().unwrap_or_default()),
            ValueKind::None => self.string("null"),
            ValueKind::Bool => self.string(if key.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.string(&number(key)?),
            kind => return Err(failed(format!("tojson: a key of type {kind} is not JSON serializable"))),
        }
        Ok(())
    }

    fn open(&mut self, bracket: char) -> Result<()> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(failed(format!("tojson: lists and maps are nested more than {MAX_DEPTH} deep")));
        }
        self.out.push(bracket);
        Ok(())
    }

    fn separate(&mut self, first: &mut bool) {
        if !std::mem::replace(first, false) {
            self.out.push_str(&self.item);
        }
        self.new_line();
    }

    fn close(&mut self, bracket: char, empty: bool) {
        self.depth -= 1;
        if !empty {
            self.new_line();
        }
        self.out.push(bracket);
    }

    fn new_line(&mut self) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            (0..self.depth).for_each(|_| self.out.push_str(indent));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.ascii && c > '\u{7e}') => self.escape(c),
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }

    fn escape(&mut self, c: char) {
        for unit in c.encode_utf16(&mut [0; 2]) {
            self.out.push_str(&format!("\\u{unit:04x}"));
        }
    }
}

fn number(value: &Value) -> Result<String> {
    if value.is_integer() { Ok(value.to_string()) } else { Ok(float(f64::try_from(value.clone())?)) }
}

/// A number as Python's `json.dumps` writes it: 1e20 is `1e+20`, 1e-7 is `1e-07`.
fn float(number: f64) -> String {
    if number.is_nan() {
        return "NaN".into();
    }
    if number.is_infinite() {
        return if number > 0.0 { "Infinity" } else { "-Infinity" }.into();
    }
    let text = format!("{number:?}");
    match text.split_once('e') {
        None => text,
        Some((digits, exponent)) => match exponent.strip_prefix('-') {
            Some(exponent) => format!("{digits}e-{exponent:0>2}"),
            None => format!("{digits}e+{exponent:0>2}"),
        },
    }
}

fn failed(reason: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}

/// The function `strftime_now` of transformers, in UTC: the library does not read the time zone.
pub(super) fn strftime_now(format: &str) -> Result<String> {
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH);
    let seconds = elapsed.map_err(|_| failed("strftime_now: the system's clock is before 1970"))?.as_secs();
    strftime(format, seconds)
}

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] =
    ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"];

fn strftime(format: &str, seconds: u64) -> Result<String> {
    let mut out = String::new();
    let mut letters = format.chars();
    while let Some(c) = letters.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match letters.next() {
            // As in glibc, %-d is %d without its zeros.
            Some('-') => {
                let padded = field(letters.next(), seconds)?;
                let bare = padded.trim_start_matches(['0', ' ']);
                out.push_str(if bare.is_empty() { "0" } else { bare });
            }
            letter => out.push_str(&field(letter, seconds)?),
        }
    }
    Ok(out)
}

fn field(letter: Option<char>, seconds: u64) -> Result<String> {
    let (year, month, day) = date(seconds / 86400);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let weekday = DAYS[((seconds / 86400 + 4) % 7) as usize];
    let month_name = MONTHS[(month - 1) as usize];
    Ok(match letter {
        Some('Y') => year.to_string(),
        Some('y') => format!("{:02}", year % 100),
        Some('m') => format!("{month:02}"),
        Some('d') => format!("{day:02}"),
        Some('e') => format!("{day:2}"),
        Some('j') => format!("{:03}", day_of_year(seconds / 86400)),
        Some('B') => month_name.to_string(),
        Some('b' | 'h') => month_name[..3].to_string(),
        Some('A') => weekday.to_string(),
        Some('a') => weekday[..3].to_string(),
        Some('H') => format!("{hour:02}"),
        Some('I') => format!("{:02}", (hour + 11) % 12 + 1),
        Some('p') => if hour < 12 { "AM" } else { "PM" }.to_string(),
        Some('M') => format!("{minute:02}"),
        Some('S') => format!("{second:02}"),
        Some('F') => format!("{year}-{month:02}-{day:02}"),
        Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
        Some('Z') => "UTC".to_string(),
        Some('%') => "%".to_string(),
        Some(other) => return Err(failed(format!("strftime_now: %{other} is not offered"))),
        None => return Err(failed("strftime_now: the format ends in %")),
    })
}

/// Year, month and day of a day since 1970, in the Gregorian calendar.
fn date(days: u64) -> (u64, u64, u64) {
    // Years that begin in March have their leap day last; 400 of them have 146097 days.
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

fn day_of_year(days: u64) -> u64 {
    let year = date(days).0;
    (1..=366).find(|n| date(days.saturating_sub(*n)).0 != year || days < *n).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dumps(template: &str) -> String {
        let mut environment = minijinja::Environment::new();
        environment.add_filter("tojson", tojson);
        environment.render_str(template, ()).unwrap()
    }

    #[test]
    fn json_is_written_as_python_writes_it() {
        assert_eq!(dumps("{{ [1, 'a', none, true, 1.5, {}] | tojson }}"), r#"[1, "a", null, true, 1.5, {}]"#);
        assert_eq!(dumps("{{ '<a href=\"é\">&\\u0001\\u007f' | tojson }}"), "\"<a href=\\\"é\\\">&\\u0001\u{7f}\"");
        assert_eq!(dumps("{{ {'b': [1, {}], 'a': []} | tojson(indent=2) }}"), "{\n  \"b\": [\n    1,\n    {}\n  ],\n  \"a\": []\n}");
        assert_eq!(dumps("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}"), r#"{"a": 2, "b": 1}"#);
        assert_eq!(dumps("{{ [1, 2] | tojson(separators=(',', ':')) }}"), "[1,2]");
        // 1 and true would be the same key.
        assert_eq!(dumps("{{ {2: 1, none: 3, true: 4} | tojson }}"), r#"{"2": 1, "null": 3, "true": 4}"#);
        assert_eq!(dumps("{{ 'é😀' | tojson(ensure_ascii=true) }}"), r#""\u00e9\ud83d\ude00""#);
    }

    #[test]
    fn floats_are_written_as_python_writes_them() {
        let cases = [
            (1e20, "1e+20"),
            (1e16, "1e+16"),
            (1e15, "1000000000000000.0"),
            (1e-7, "1e-07"),
            (0.0001, "0.0001"),
            (1.25e-5, "1.25e-05"),
            (-0.0, "-0.0"),
            (1e100, "1e+100"),
            (0.1, "0.1"),
            (f64::NAN, "NaN"),
            (f64::NEG_INFINITY, "-Infinity"),
        ];
        for (number, text) in cases {
            assert_eq!(float(number), text);
        }
    }

    #[test]
    fn what_is_no_json_is_an_error() {
        let mut environment = minijinja::Environment::new();
        environment.add_filter("tojson", tojson);
        for template in ["{{ missing | tojson }}", "{{ [range] | tojson }}", "{{ 1 | tojson(indent=-1, x=2) }}"] {
            assert!(environment.render_str(template, ()).is_err(), "{template}");
        }
    }

    #[test]
    fn value_that_contains_itself_is_an_error() {
        let mut environment = minijinja::Environment::new();
        environment.add_filter("tojson", tojson);
        let template = "{% set ns = namespace() %}{% set ns.me = ns %}{{ ns | tojson }}";
        let error = environment.render_str(template, ()).unwrap_err();
        assert!(error.to_string().contains("128 deep"), "{error}");
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        let cases = [
            (0, "Thursday 01 January 1970 00:00:00 AM 001"),
            (951_825_599, "Tuesday 29 February 2000 11:59:59 AM 060"),
            (1_732_177_505, "Thursday 21 November 2024 08:25:05 AM 326"),
            (4_107_542_399, "Sunday 28 February 2100 23:59:59 PM 059"),
            (1_735_689_599, "Tuesday 31 December 2024 23:59:59 PM 366"),
        ];
        for (seconds, text) in cases {
            assert_eq!(strftime("%A %d %B %Y %H:%M:%S %p %j", seconds).unwrap(), text);
        }
        assert_eq!(strftime("%-d %b %y, %I%% %F", 86400 * 5).unwrap(), "6 Jan 70, 12% 1970-01-06");
    }

    #[test]
    fn unknown_letter_of_a_date_is_an_error() {
        for format in ["%Q", "%", "%-", "%-Q"] {
            assert!(strftime(format, 0).is_err());
        }
        assert!(strftime_now("%Y").unwrap().starts_with('2'));
    }
}
