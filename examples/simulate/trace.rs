//! Traces of requests in public formats: arrival times and lengths.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use serde::Deserialize;

use super::simulation::device::Result;

/// Maximum length of a prompt or of an output. Longer ones are errors of the trace.
const MAX_TOKENS: u64 = 10_000_000;
/// Maximum length of a trace. Larger numbers are in other units.
const MAX_SECONDS: f64 = 1e9;
/// Bytes of text per token, for traces with texts instead of lengths.
const BYTES_PER_TOKEN: usize = 4;

/// One request of a trace.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TracedRequest {
    /// Seconds since the first request. None: the trace has no times.
    pub at: Option<f64>,
    pub prompt: usize,
    pub output: usize,
}

/// A public format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Azure LLM inference: CSV with TIMESTAMP, ContextTokens and GeneratedTokens.
    Azure,
    /// BurstGPT: CSV with Timestamp, Request tokens and Response tokens.
    BurstGpt,
    /// Mooncake: a JSON object per line with timestamp, input_length and output_length.
    Mooncake,
    /// ShareGPT: a JSON list of conversations, of which the first question and answer count.
    ShareGpt,
}

#[derive(Debug)]
pub struct Trace {
    pub format: Format,
    pub requests: Vec<TracedRequest>,
    /// Number of requests that have no output and are skipped.
    pub without_output: usize,
}

impl Trace {
    pub fn load(path: &Path) -> Result<Trace> {
        let file = std::fs::File::open(path).map_err(|error| format!("trace {}: {error}", path.display()))?;
        Trace::read(file).map_err(|problem| format!("trace {}:{problem}", path.display()))
    }

    /// Reads a trace in the format that its first line shows. Errors begin with the line.
    pub fn read(source: impl Read) -> Result<Trace> {
        let mut lines = Lines { source: BufReader::new(source), number: 0, line: String::new() };
        let first = lines.next()?.ok_or("1: the trace is empty")?.trim_start_matches('\u{feff}').to_string();
        let columns = |names: [&str; 3]| {
            let header: Vec<&str> = first.split(',').map(str::trim).collect();
            let found = names.map(|name| header.iter().position(|column| column.eq_ignore_ascii_case(name)));
            found.iter().all(Option::is_some).then(|| found.map(|place| place.expect("all are found")))
        };
        let mut trace = Trace { format: Format::ShareGpt, requests: Vec::new(), without_output: 0 };
        if let Some(columns) = columns(["TIMESTAMP", "ContextTokens", "GeneratedTokens"]) {
            trace.format = Format::Azure;
            trace.read_csv(&mut lines, columns, date_seconds)?;
        } else if let Some(columns) = columns(["Timestamp", "Request tokens", "Response tokens"]) {
            trace.format = Format::BurstGpt;
            trace.read_csv(&mut lines, columns, |text| text.parse().map_err(|_| "must be a number of seconds".to_string()))?;
        } else if first.starts_with('{') {
            trace.format = Format::Mooncake;
            trace.read_mooncake(&mut lines, first)?;
        } else if first.starts_with('[') {
            trace.read_sharegpt(&mut lines, first)?;
        } else {
            return Err(format!(
                "1: unknown format ({:.60}); pass the CSV of Azure (TIMESTAMP,ContextTokens,GeneratedTokens) or BurstGPT (Timestamp,...,Request tokens,Response tokens,...), the JSON lines of Mooncake or the JSON of ShareGPT",
                first
            ));
        }
        trace.start_at_zero()?;
        Ok(trace)
    }

    fn read_csv(&mut self, lines: &mut Lines<impl Read>, columns: [usize; 3], time: impl Fn(&str) -> Result<f64>) -> Result<()> {
        while let Some(line) = lines.next()? {
            if line.trim().is_empty() {
                continue;
            }
            let values: Vec<&str> = line.split(',').map(str::trim).collect();
            let value = |column: usize| {
                values
                    .get(column)
                    .copied()
                    .ok_or_else(|| format!("the line has {} columns, at least {} are needed", values.len(), column + 1))
            };
            let [at, prompt, output] = columns;
            let request = value(at)
                .and_then(|text| time(text).map_err(|problem| format!("time is {text}; {problem}")))
                .and_then(|at| Ok((at, length("prompt", value(prompt)?)?, length("output", value(output)?)?)));
            let (at, prompt, output) = request.map_err(|problem| lines.at(&problem))?;
            self.add(lines.number, Some(at), prompt, output)?;
        }
        Ok(())
    }

    fn read_mooncake(&mut self, lines: &mut Lines<impl Read>, first: String) -> Result<()> {
        #[derive(Deserialize)]
        struct Record {
            /// Milliseconds.
            timestamp: f64,
            input_length: i64,
            output_length: i64,
        }
        let mut line = Some(first);
        while let Some(text) = line {
            if !text.trim().is_empty() {
                let Record { timestamp, input_length, output_length } =
                    serde_json::from_str(&text).map_err(|error| lines.at(&format!("not a request of Mooncake: {error}")))?;
                let lengths = length("input_length", &input_length.to_string())
                    .and_then(|input| Ok((input, length("output_length", &output_length.to_string())?)));
                let (prompt, output) = lengths.map_err(|problem| lines.at(&problem))?;
                self.add(lines.number, Some(timestamp / 1e3), prompt, output)?;
            }
            line = lines.next()?.map(str::to_string);
        }
        Ok(())
    }

    fn read_sharegpt(&mut self, lines: &mut Lines<impl Read>, first: String) -> Result<()> {
        #[derive(Deserialize)]
        struct Conversation {
            #[serde(default)]
            conversations: Vec<Turn>,
        }
        #[derive(Deserialize)]
        struct Turn {
            value: String,
        }
        let source = std::io::Cursor::new(first + "\n").chain(&mut lines.source);
        let all: Vec<Conversation> =
            serde_json::from_reader(source).map_err(|error| format!("{}: not conversations of ShareGPT: {error}", error.line()))?;
        for conversation in all {
            if let [question, answer, ..] = &conversation.conversations[..] {
                let tokens = |turn: &Turn| turn.value.len().div_ceil(BYTES_PER_TOKEN);
                self.add(0, None, tokens(question).max(1), tokens(answer))?;
            }
        }
        Ok(())
    }

    fn add(&mut self, line: usize, at: Option<f64>, prompt: usize, output: usize) -> Result<()> {
        if prompt == 0 {
            return Err(format!("{line}: the prompt has 0 tokens; a request has at least 1"));
        }
        if let Some(at) = at.filter(|at| !at.is_finite()) {
            return Err(format!("{line}: time is {at}; must be a number"));
        }
        let after = at.zip(self.requests.first().and_then(|first| first.at)).map(|(at, first)| at - first);
        if let Some(after) = after.filter(|after| *after > MAX_SECONDS) {
            return Err(format!("{line}: time is {after} s after the first request; must be at most {MAX_SECONDS} s"));
        }
        if let Some((at, before)) = at.zip(self.requests.last().and_then(|request| request.at)).filter(|(at, before)| at < before) {
            return Err(format!("{line}: time is {at} s, before the previous request ({before} s); sort the trace by time"));
        }
        match output {
            0 => self.without_output += 1,
            _ => self.requests.push(TracedRequest { at, prompt, output }),
        }
        Ok(())
    }

    /// Makes times relative to the first request.
    fn start_at_zero(&mut self) -> Result<()> {
        let first = self
            .requests
            .first()
            .ok_or_else(|| format!("1: the trace has no request with an output ({} without)", self.without_output))?
            .at;
        for request in &mut self.requests {
            request.at = request.at.zip(first).map(|(at, first)| at - first);
        }
        Ok(())
    }
}

struct Lines<R> {
    source: BufReader<R>,
    /// Number of the last line, from 1.
    number: usize,
    line: String,
}

impl<R: Read> Lines<R> {
    fn next(&mut self) -> Result<Option<&str>> {
        self.line.clear();
        self.number += 1;
        match self.source.read_line(&mut self.line) {
            Ok(0) => Ok(None),
            Ok(_) => Ok(Some(self.line.trim_end())),
            Err(error) => Err(self.at(&error.to_string())),
        }
    }

    fn at(&self, problem: &str) -> String {
        format!("{}: {problem}", self.number)
    }
}

fn length(what: &str, text: &str) -> Result<usize> {
    // Some exports write whole numbers as floats.
    let number = text.strip_suffix(".0").unwrap_or(text);
    match number.parse::<u64>() {
        Ok(length) if length <= MAX_TOKENS => Ok(length as usize),
        _ => Err(format!("{what} is {text:.40} tokens; must be 0 to {MAX_TOKENS}")),
    }
}

/// Reads a time such as 2023-11-16 18:17:03.9799600 as seconds. Only differences matter.
fn date_seconds(text: &str) -> Result<f64> {
    let parse = || {
        let (date, time) = text.split_once([' ', 'T'])?;
        let mut date = date.splitn(3, '-').map(|part| part.parse::<i64>().ok());
        let (year, month, day) = (date.next()??, date.next()??, date.next()??);
        let time = time.split(['+', 'Z']).next()?;
        let mut time = time.splitn(3, ':').map(|part| part.parse::<f64>().ok());
        let (hours, minutes, seconds) = (time.next()??, time.next()??, time.next()??);
        let is_valid = (1..=12).contains(&month) && (1..=31).contains(&day) && (1970..10_000).contains(&year);
        // Days since March of year 0: the leap day is the last day of a year.
        let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
        let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day;
        is_valid.then_some(days as f64 * 86_400.0 + hours * 3600.0 + minutes * 60.0 + seconds)
    };
    parse().ok_or_else(|| "must be like 2023-11-16 18:17:03.97".to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Trace> {
        Trace::read(text.as_bytes())
    }

    fn requests(text: &str) -> Vec<(Option<f64>, usize, usize)> {
        let round = |at: f64| (at * 1e3).round() / 1e3;
        read(text).unwrap().requests.iter().map(|request| (request.at.map(round), request.prompt, request.output)).collect()
    }

    #[test]
    fn every_public_format_is_recognized() {
        let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 23:59:59.5000000,4808,10\n2023-11-17 00:00:01.2500000,3180,8\n";
        assert_eq!(requests(azure), [(Some(0.0), 4808, 10), (Some(1.75), 3180, 8)]);
        let burst = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,0,1087,API log\n118,GPT-4,417,276,693,Conversation log\n";
        assert_eq!(requests(burst), [(Some(0.0), 472, 18), (Some(113.0), 417, 276)]);
        assert_eq!(read(burst).unwrap().without_output, 1);
        let mooncake = "{\"timestamp\": 27482, \"input_length\": 6955, \"output_length\": 52, \"hash_ids\": [46, 47]}\n{\"timestamp\": 30535, \"input_length\": 6472, \"output_length\": 26, \"hash_ids\": []}\n";
        assert_eq!(requests(mooncake), [(Some(0.0), 6955, 52), (Some(3.053), 6472, 26)]);
        let sharegpt = "[{\"id\": \"a\", \"conversations\": [{\"from\": \"human\", \"value\": \"12345\"}, {\"from\": \"gpt\", \"value\": \"1234567890\"}]},\n {\"id\": \"b\", \"conversations\": []}]";
        assert_eq!(requests(sharegpt), [(None, 2, 3)]);
    }

    #[test]
    fn a_leap_day_has_86400_seconds() {
        let days = |a: &str, b: &str| date_seconds(b).unwrap() - date_seconds(a).unwrap();
        assert_eq!(days("2024-02-28 00:00:00", "2024-03-01 00:00:00"), 2.0 * 86_400.0);
        assert_eq!(days("2023-02-28 00:00:00", "2023-03-01 00:00:00"), 86_400.0);
        assert_eq!(days("2023-12-31T23:00:00Z", "2024-01-01T00:00:00+00:00"), 3600.0);
    }

    #[test]
    fn errors_name_the_line_the_value_and_the_remedy() {
        let refused = |text: &str, line: usize, parts: [&str; 2]| {
            let problem = read(text).unwrap_err();
            assert!(problem.starts_with(&format!("{line}: ")) && parts.iter().all(|part| problem.contains(part)), "{problem}");
        };
        let azure = |line: &str| format!("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00,10,10\n{line}\n");
        refused("", 1, ["empty", "trace"]);
        refused("time,tokens\n1,2\n", 1, ["unknown format", "Azure"]);
        refused(&azure("2023-11-16 18:00:01,-5,10"), 3, ["prompt is -5", "must be 0 to"]);
        refused(&azure("2023-11-16 18:00:01,5,99999999999"), 3, ["output is 99999999999", "10000000"]);
        refused(&azure("2023-11-16 17:00:00,5,10"), 3, ["before the previous", "sort"]);
        refused(&azure("yesterday,5,10"), 3, ["time is yesterday", "2023-11-16"]);
        refused(&azure("2023-11-16 18:00:01,5"), 3, ["2 columns", "3 are needed"]);
        refused(&azure("2023-11-16 18:00:01,0,10"), 3, ["0 tokens", "at least 1"]);
        refused("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:01,5,0\n", 1, ["no request", "1 without"]);
        refused("{\"timestamp\": 1, \"input_length\": 3, \"output_length\": 4}\n{\"timestamp\": 2}\n", 2, ["Mooncake", "input_length"]);
        refused("{\"timestamp\": 1, \"input_length\": -3, \"output_length\": 4}\n", 1, ["input_length is -3", "must be"]);
        refused("[{\"conversations\":\n [{\"from\": 1}]}]", 2, ["ShareGPT", "value"]);
        refused("Timestamp,Request tokens,Response tokens\nNaN,3,4\n", 2, ["time is NaN", "number"]);
        // The second time is in nanoseconds.
        refused("Timestamp,Request tokens,Response tokens\n1,3,4\n1700000000000000000,3,4\n", 3, ["time is 17", "at most 1000000000 s"]);
    }
}
