//! Time to load a model from its own files and from its packed form, compared with reading the
//! packed file once: from disk and from the page cache.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::Instant;

use pagedllm::engine::Engine;
use pagedllm::model::PackedForm;
use pagedllm::types::options::{EngineOptions, WeightFormat};

use crate::Result;
use crate::common::{median, read_whole};

const REPETITIONS: usize = 5;

pub fn print(model: &str, dir: &Path, packed: &Path) -> Result<()> {
    println!("Loading model {model}: seconds\n");
    println!("| Weights | packed | packed and saved | read from disk | file only | ratio | read from memory | file only | ratio |");
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    for format in [WeightFormat::Bf16, WeightFormat::Int8, WeightFormat::Int4 { group: 128, offsets: false }] {
        let _ = fs::remove_dir_all(packed);
        fs::create_dir_all(packed)?;
        let options =
            EngineOptions { model_dir: dir.into(), weight_format: Some(format), skip_tokenizer: true, max_seqs: 8, ..Default::default() };
        let plain = load(&options, PackedForm::Unused)?;
        let options = EngineOptions { packed_dir: Some(packed.into()), ..options };
        let saved = load(&options, PackedForm::Saved)?;
        let form = packed_file(packed)?;
        let [disk, memory] = [true, false].map(|cold| Times::measure(&options, &form, cold));
        println!("| {} | {plain:.2} | {saved:.2} | {} | {} |", format.name(), disk?, memory?);
    }
    println!();
    Ok(fs::remove_dir_all(packed)?)
}

/// Median times in seconds.
struct Times {
    read: f64,
    file: f64,
    ratio: f64,
}

impl Times {
    /// `cold`: the page cache drops the file before each load.
    fn measure(options: &EngineOptions, form: &Path, cold: bool) -> Result<Times> {
        let (mut read, mut file, mut ratio) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..REPETITIONS {
            if cold {
                drop_from_page_cache(form)?;
            }
            file.push(read_whole(form)?);
            if cold {
                drop_from_page_cache(form)?;
            }
            read.push(load(options, PackedForm::Read)?);
            ratio.push(read[read.len() - 1] / file[file.len() - 1]);
        }
        let [read, file, ratio] = [read, file, ratio].map(median);
        Ok(Times { read, file, ratio })
    }
}

impl std::fmt::Display for Times {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{:.3} | {:.3} | {:.2}", self.read, self.file, self.ratio)
    }
}

/// Drops the file from the page cache.
fn drop_from_page_cache(path: &Path) -> Result<()> {
    let file = File::open(path)?;
    file.sync_all()?;
    // SAFETY: the descriptor is open.
    match unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) } {
        0 => Ok(()),
        code => Err(std::io::Error::from_raw_os_error(code).into()),
    }
}

/// Loads an engine and returns the time in seconds.
fn load(options: &EngineOptions, expected: PackedForm) -> Result<f64> {
    let start = Instant::now();
    let engine = Engine::create(options)?;
    let seconds = start.elapsed().as_secs_f64();
    match engine.info().packed.form == expected {
        true => Ok(seconds),
        false => Err(format!("packed form is {:?}, expected {expected:?}", engine.info().packed).into()),
    }
}

fn packed_file(dir: &Path) -> Result<PathBuf> {
    let entry = fs::read_dir(dir)?.next().ok_or("no packed file was saved")?;
    Ok(entry?.path())
}
