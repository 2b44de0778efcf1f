//! pagedllm-replay: repeats the steps of a journal and compares their outputs.

use std::path::Path;
use std::process::ExitCode;

use pagedllm::engine::journal::{Ending, JournalFile, Replay, Summary};
use pagedllm::error::Result;

const USAGE: &str = "usage: pagedllm-replay JOURNAL MODEL_DIRECTORY

Runs every step of the journal again with the model that it was written with.
0: everything was said again, bit for bit; 1: something was not; 2: it cannot be replayed here; 3: what can be read was said again, and
the rest is damaged or cut off.";

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let [journal, model] = &arguments[..] else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    match replay(Path::new(journal), Path::new(model)) {
        Ok(summary) => {
            print(&summary);
            match summary {
                Summary { difference: Some(_), .. } => ExitCode::from(1),
                Summary { ending: Some(Ending::Torn { .. }), .. } => ExitCode::from(3),
                _ => ExitCode::SUCCESS,
            }
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}

fn replay(journal: &Path, model: &Path) -> Result<Summary> {
    let file = JournalFile::open(journal)?;
    let header = &file.header;
    println!("written by release {} on {}, {} blocks of {}", header.library, header.isa, header.blocks, header.block_size);
    Replay::load(file, model)?.run()
}

fn print(summary: &Summary) {
    let Summary { steps, requests, sequences, tokens, .. } = summary;
    println!("{steps} steps, {requests} requests; {sequences} sequences ended, with {tokens} tokens");
    match &summary.ending {
        Some(Ending::Torn { bytes }) => println!("the journal is damaged or cut off after {bytes} bytes: it was replayed up to there"),
        Some(Ending::Open) => println!("the journal was not closed: the process was killed, or its disk failed"),
        Some(Ending::Closed) | None => {}
    }
    match &summary.difference {
        None => println!("the same, bit for bit"),
        Some(difference) => println!("different in step {}: {}", difference.step, difference.what),
    }
    if !summary.hooked.is_empty() {
        println!(
            "a host edited the logits of {:?}, which is not in the journal: from there on a difference proves nothing",
            summary.hooked
        );
    }
}
