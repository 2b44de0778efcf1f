//! pagedllm-replay: repeats the steps of a journal and compares their outputs.

use std::path::Path;
use std::process::ExitCode;

use pagedllm::engine::journal::{Ending, JournalFile, Replay, Summary};
use pagedllm::error::Result;

const USAGE: &str = "usage: pagedllm-replay JOURNAL MODEL_DIRECTORY

Repeats every step of a journal with the model of the journal and compares the outputs.

Exit status:
  0  all outputs are the same, bit for bit
  1  an output differs
  2  the journal cannot be replayed on this machine
  3  the outputs are the same up to a damaged or missing part of the journal";

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
        Some(Ending::Torn { bytes }) => {
            println!("the journal is damaged or cut off after {bytes} bytes; the steps before that were repeated")
        }
        Some(Ending::Open) => println!("the journal was not closed; the process was killed or the disk failed"),
        Some(Ending::Closed) | None => {}
    }
    match &summary.difference {
        None => println!("the same, bit for bit"),
        Some(difference) => println!("different in step {}: {}", difference.step, difference.what),
    }
    if !summary.hooked.is_empty() {
        println!(
            "a logits hook edited the logits of requests {:?}; the journal lacks these edits, so later outputs may differ",
            summary.hooked.iter().map(|seq| seq.get()).collect::<Vec<_>>()
        );
    }
}
