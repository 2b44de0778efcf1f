//! Loading a model from its own files, and from the packed form that is kept of it, beside reading the packed file once: from the disk, and
//! where the system has it in memory.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::Instant;

use pagedllm::engine::Engine;
use pagedllm::model::PackedForm;
use pagedllm::options::{EngineOptions, WeightFormat};

use crate::Result;
use crate::common::{median, read_whole};

const REPETITIONS: usize = 5;

pub fn print(model: &str, dir: &Path, packed: &Path) -> Result<()> {
    println!("Loading model {model}: seconds\n");
    println!(
        "| Weights | packed | packed and saved | read from the disk | the file alone | ratio | read from memory | the file alone | ratio |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    for format in [WeightFormat::Bf16, WeightFormat::Int8, WeightFormat::Int4 { group: 128, offsets: false }] {
        let _ = fs::remove_dir_all(packed);
        fs::create_dir_all(packed)?;
        let options =
            EngineOptions { model_dir: dir.into(), weight_format: Some(format), skip_tokenizer: true, max_seqs: 8, ..Default::default() };
        let plain = load(&options, PackedForm::Unused)?;
        let options = EngineOptions { packed_dir: Some(packed.into()), ..options };
        let saved = load(&options, PackedForm::Saved)?;
        let form = form_in(packed)?;
        let [disk, memory] = [true, false].map(|cold| Times::take(&options, &form, cold));
        println!("| {} | {plain:.2} | {saved:.2} | {} | {} |", format.name(), disk?, memory?);
    }
    println!();
    Ok(fs::remove_dir_all(packed)?)
}

/// Medians, in seconds.
struct Times {
    read: f64,
    file: f64,
    ratio: f64,
}

impl Times {
    /// `cold`: the system forgets the file before each.
    fn take(options: &EngineOptions, form: &Path, cold: bool) -> Result<Times> {
        let (mut read, mut file, mut ratio) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..REPETITIONS {
            if cold {
                forget(form)?;
            }
            file.push(read_whole(form)?);
            if cold {
                forget(form)?;
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

/// What the system holds of the file in memory goes, as far as it is on the disk.
fn forget(path: &Path) -> Result<()> {
    let file = File::open(path)?;
    file.sync_all()?;
    // SAFETY: a call about a descriptor that is ours and open.
    match unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) } {
        0 => Ok(()),
        code => Err(std::io::Error::from_raw_os_error(code).into()),
    }
}

/// In seconds.
fn load(options: &EngineOptions, expected: PackedForm) -> Result<f64> {
    let start = Instant::now();
    let engine = Engine::create(options)?;
    let seconds = start.elapsed().as_secs_f64();
    match engine.info().packed.form == expected {
        true => Ok(seconds),
        false => Err(format!("{:?}, not {expected:?}", engine.info().packed).into()),
    }
}

fn form_in(dir: &Path) -> Result<PathBuf> {
    let entry = fs::read_dir(dir)?.next().ok_or("nothing was saved")?;
    Ok(entry?.path())
}
