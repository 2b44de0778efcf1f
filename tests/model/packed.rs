//! Tests of packed weights on disk. They give the same bits as the files of the model, and a
//! damaged file only costs time.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Barrier;
use std::time::{Duration, SystemTime};

use crate::support::{Random, TempDir, configs, goldens, write_random_model};
use pagedllm::engine::{Engine, Prompt, Request};
use pagedllm::error::{Code, Error};
use pagedllm::model::{PackedForm, PackedReport};
use pagedllm::types::options::{EngineOptions, SamplingParams, WeightFormat};
use serde_json::{Value, json};

/// Bytes of the lines in the header of a packed file.
const HEADER: usize = 512;

fn llama() -> Value {
    json!({"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
        "intermediate_size": 96, "vocab_size": 131, "max_position_embeddings": 64, "eos_token_id": 2})
}

fn experts() -> Value {
    json!({"architectures": ["Qwen2MoeForCausalLM"], "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 2, "intermediate_size": 96, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
        "num_experts": 7, "num_experts_per_tok": 2, "vocab_size": 127, "max_position_embeddings": 64, "eos_token_id": 2})
}

fn options(model: &Path, packed: Option<&Path>) -> EngineOptions {
    EngineOptions {
        model_dir: model.into(),
        packed_dir: packed.map(Into::into),
        skip_tokenizer: true,
        threads: Some(2),
        max_batch_tokens: 32,
        max_seqs: 2,
        max_model_len: Some(32),
        ..Default::default()
    }
}

/// Returns the tokens that follow a prompt, and the bits of the log probabilities of these and
/// other tokens.
fn answer(engine: &Engine) -> Vec<(u32, u32)> {
    let vocab = engine.info().vocab_size as u32;
    let prompt = (0..9).map(|i| (i * 37 + 3) % vocab).collect();
    let sampling = SamplingParams { max_tokens: Some(6), ignore_eos: true, logprobs: Some(8), ..SamplingParams::greedy() };
    engine.add_request(Request::new(Prompt::Tokens(prompt), sampling)).unwrap();
    while engine.step().unwrap().unfinished > 0 {}
    let mut bits = Vec::new();
    for output in engine.queue().poll(Some(Duration::ZERO)).unwrap() {
        assert_eq!(output.error, None);
        bits.extend(output.tokens.iter().copied().zip(output.logprobs.tokens.iter().map(|p| p.to_bits())));
        bits.extend(output.logprobs.top.iter().map(|(token, p)| (*token, p.to_bits())));
    }
    assert!(bits.len() >= 6 * 8, "{}", bits.len());
    bits
}

fn load(options: &EngineOptions) -> (PackedReport, Vec<(u32, u32)>) {
    let engine = Engine::create(options).unwrap();
    (engine.info().packed.clone(), answer(&engine))
}

/// A model, the directory of its packed weights, and its answer.
struct Case {
    model: TempDir,
    packed: TempDir,
    format: Option<WeightFormat>,
    answer: Vec<(u32, u32)>,
}

impl Case {
    fn new(config: &Value, format: Option<WeightFormat>) -> Case {
        let model = TempDir::new();
        write_random_model(&model.0, config, true, 7);
        let plain = EngineOptions { weight_format: format, ..options(&model.0, None) };
        let (report, answer) = load(&plain);
        assert_eq!(report, PackedReport::default());
        Case { model, packed: TempDir::new(), format, answer }
    }

    fn options(&self) -> EngineOptions {
        EngineOptions { weight_format: self.format, ..options(&self.model.0, Some(&self.packed.0)) }
    }

    /// Loads the model and checks its answer.
    #[track_caller]
    fn load(&self, case: &str) -> PackedReport {
        let (report, answer) = load(&self.options());
        assert!(answer == self.answer, "{case}: other bits after {report:?}");
        report
    }

    /// Saves the packed weights and returns their path.
    fn save(&self) -> PathBuf {
        let report = self.load("saved");
        assert_eq!((report.form, report.reason.as_str()), (PackedForm::Saved, "no packed weights yet"));
        self.form()
    }

    fn files(&self) -> Vec<PathBuf> {
        fs::read_dir(&self.packed.0).unwrap().map(|entry| entry.unwrap().path()).collect()
    }

    /// Returns the only file in the directory.
    fn form(&self) -> PathBuf {
        let files = self.files();
        assert!(files.len() == 1 && files[0].extension().unwrap() == "packed", "{files:?}");
        files[0].clone()
    }

    #[track_caller]
    fn expect_read(&self, case: &str) {
        assert_eq!(self.load(case), PackedReport { form: PackedForm::Read, reason: String::new() }, "{case}");
    }

    /// Checks that the weights were packed for the reason `why`, and that the file is complete
    /// again.
    #[track_caller]
    fn expect_saved(&self, case: &str, why: &str, whole: &[u8]) {
        let report = self.load(case);
        assert!(report.form == PackedForm::Saved && report.reason.contains(why), "{case}: {report:?}");
        assert!(fs::read(self.form()).unwrap() == whole, "{case}: the file was not replaced");
    }

    #[track_caller]
    fn expect_unsaved(&self, case: &str, why: &str) {
        let report = self.load(case);
        assert!(report.form == PackedForm::Unsaved && report.reason.contains(why), "{case}: {report:?}");
    }
}

#[test]
fn packed_weights_give_the_same_bits_in_every_format() {
    let formats = [None].into_iter().chain(WeightFormat::all(32).map(Some));
    for (format, config) in formats.flat_map(|format| [(format, llama()), (format, experts())]) {
        let case = Case::new(&config, format);
        case.save();
        case.expect_read(&format!("{format:?}"));
    }
}

#[test]
fn packed_weights_give_the_same_bits_for_every_shape_of_decoder() {
    let mut shapes = 0;
    for (name, config) in configs(64) {
        let case = Case::new(&config, Some(WeightFormat::Int8));
        case.save();
        case.expect_read(name);
        shapes += 1;
    }
    let dirs = fs::read_dir(goldens()).unwrap().map(|entry| entry.unwrap().path());
    for model in dirs.filter(|dir| dir.join("model.safetensors").exists()) {
        let packed = TempDir::new();
        let [(_, plain), (saved, first), (read, second)] =
            [None, Some(packed.0.as_path()), Some(packed.0.as_path())].map(|dir| load(&options(&model, dir)));
        assert_eq!((saved.form, read.form), (PackedForm::Saved, PackedForm::Read), "{}", model.display());
        assert!(plain == first && plain == second, "{}", model.display());
        shapes += 1;
    }
    assert!(shapes > 60, "{shapes}");
}

#[test]
fn models_and_formats_share_a_directory() {
    let (llama, mut experts) = (Case::new(&llama(), None), Case::new(&experts(), None));
    let (llama_form, dir) = (llama.save(), &llama.packed.0);
    experts.packed = TempDir(dir.clone());
    assert_eq!(experts.load("a second model in the directory").form, PackedForm::Saved);
    let int8 = EngineOptions { weight_format: Some(WeightFormat::Int8), ..llama.options() };
    assert_eq!(load(&int8).0.form, PackedForm::Saved);
    assert_eq!(fs::read_dir(dir).unwrap().count(), 3);
    llama.expect_read("several models in the directory");
    experts.expect_read("several models in the directory");
    assert_eq!(load(&int8).0.form, PackedForm::Read);
    // The file of another model under the name of this one.
    let other = llama.files().into_iter().find(|file| *file != llama_form).unwrap();
    fs::copy(other, &llama_form).unwrap();
    let report = llama.load("the file of another model");
    assert!(report.form == PackedForm::Saved && report.reason.contains("packed from another model"), "{report:?}");
    std::mem::forget(experts.packed); // the directory belongs to the other case
}

#[test]
fn a_truncated_or_extended_packed_file_is_packed_again() {
    let case = Case::new(&llama(), Some(WeightFormat::Int8));
    let form = case.save();
    let whole = fs::read(&form).unwrap();
    let len = whole.len();
    for cut in [0, 1, 100, HEADER - 1, HEADER, HEADER + 1, len / 3, len / 2, len - 5, len - 4, len - 1] {
        fs::write(&form, &whole[..cut]).unwrap();
        let why = match cut {
            ..100 => "not packed weights",
            100 => "packed from another model",
            _ => "wrong size", // zeros end the header
        };
        case.expect_saved(&format!("cut at {cut}"), why, &whole);
    }
    let mut longer = whole.clone();
    longer.push(0);
    fs::write(&form, longer).unwrap();
    case.expect_saved("longer", "wrong size", &whole);
    // Holes of the right length, and a file with a length that exceeds any memory.
    fs::write(&form, vec![0; len]).unwrap();
    case.expect_saved("zeros", "not packed weights", &whole);
    fs::write(&form, &whole).unwrap();
    File::options().write(true).open(&form).unwrap().set_len(1 << 40).unwrap();
    case.expect_saved("a terabyte", "wrong size", &whole);
    case.expect_read("the restored file");
}

#[test]
fn a_change_of_any_byte_is_detected() {
    let case = Case::new(&llama(), Some(WeightFormat::Int4 { group: 32, offsets: false }));
    let form = case.save();
    let whole = fs::read(&form).unwrap();
    let mut random = Random(3);
    // The last byte of the header, the first and last bytes of the matrices and of their checksums,
    // and some other bytes.
    let sums = whole.len() - 4 * 10;
    let ends = [0, HEADER - 1, HEADER, sums - 1, sums, whole.len() - 1];
    for place in ends.into_iter().chain((0..40).map(|_| random.below(whole.len()))) {
        let mut damaged = whole.clone();
        damaged[place] ^= 1 << (place % 8);
        fs::write(&form, damaged).unwrap();
        let why = if place < HEADER { "" } else { "wrong checksum" };
        case.expect_saved(&format!("byte {place}"), why, &whole);
    }
    case.expect_read("the restored file");
}

#[test]
fn a_packed_file_of_another_library_version_or_model_state_is_replaced() {
    let case = Case::new(&llama(), None);
    let form = case.save();
    let whole = fs::read(&form).unwrap();
    for (from, to, why) in [
        ("pagedllm packed weights", "pagedllm packed weighty", "not packed weights"),
        ("version 1", "version 0", "packed by another version of the library"),
        ("version 1", "version 2", "packed by another version of the library"),
        ("layout cpu panels of 32", "layout cpu panels of 16", ": packed for other kernels"),
    ] {
        let text = String::from_utf8(whole[..HEADER].to_vec()).unwrap();
        assert!(text.contains(from), "{text}");
        fs::write(&form, [text.replace(from, to).as_bytes(), &whole[HEADER..]].concat()).unwrap();
        case.expect_saved(to, why, &whole);
    }
    let weights = File::options().write(true).open(case.model.0.join("model.safetensors")).unwrap();
    weights.set_modified(SystemTime::now() - Duration::from_secs(1000)).unwrap();
    let report = case.load("touched");
    assert!(report.form == PackedForm::Saved && report.reason.contains("packed before the model files changed"), "{report:?}");
    case.expect_read("touched");
}

#[test]
fn changed_weights_are_packed_again() {
    let case = Case::new(&llama(), None);
    case.save();
    write_random_model(&case.model.0, &llama(), true, 8);
    let [(_, plain), (saved, first), (read, second)] =
        [None, Some(case.packed.0.as_path()), Some(case.packed.0.as_path())].map(|dir| load(&options(&case.model.0, dir)));
    assert_eq!((saved.form, read.form), (PackedForm::Saved, PackedForm::Read));
    assert!(plain == first && plain == second && plain != case.answer);
}

#[test]
fn an_unusable_packed_path_is_reported_and_the_engine_starts() {
    let case = Case::new(&llama(), None);
    let form = case.save();
    let unfinished = form.with_extension("unfinished");
    fs::remove_file(&form).unwrap();
    fs::create_dir(&form).unwrap();
    case.expect_unsaved("a directory in the place of the file", "not a regular file");
    assert_eq!(case.form(), form, "the file that could not be renamed is removed");
    fs::remove_dir(&form).unwrap();
    fs::create_dir(&unfinished).unwrap();
    case.expect_unsaved("a directory in the place of the unfinished file", "cannot be written");
    fs::remove_dir(&unfinished).unwrap();
    // A link is not followed, since its target belongs to another program.
    let victim = case.model.0.join("config.json");
    std::os::unix::fs::symlink(&victim, &unfinished).unwrap();
    let before = fs::read(&victim).unwrap();
    case.expect_unsaved("a link", "cannot be written");
    assert_eq!(fs::read(&victim).unwrap(), before);
    fs::remove_file(&unfinished).unwrap();
    // No user can write there, not even root.
    let unwritable = EngineOptions { packed_dir: Some("/proc".into()), ..case.options() };
    let (report, answer) = load(&unwritable);
    assert!(report.form == PackedForm::Unsaved && report.reason.contains("no packed weights yet; /proc/"), "{report:?}");
    assert!(answer == case.answer);
}

#[test]
fn a_packed_path_that_is_not_a_directory_is_refused() {
    let case = Case::new(&llama(), None);
    for dir in [PathBuf::from("/nonexistent"), case.model.0.join("config.json")] {
        let error = Engine::create(&EngineOptions { packed_dir: Some(dir), ..case.options() }).err().unwrap();
        assert!(error.code() == Code::Io && error.message().contains("does not exist or is not a directory"), "{error}");
    }
}

#[test]
fn a_cancelled_load_leaves_no_file() {
    let cancelled = |case: &Case| -> Error { Engine::load(&case.options(), &mut |done, all| done < all / 2).err().unwrap() };
    let case = Case::new(&llama(), None);
    assert_eq!(cancelled(&case).code(), Code::Cancelled);
    assert!(case.files().is_empty(), "{:?}", case.files());
    case.save();
    assert_eq!(cancelled(&case).code(), Code::Cancelled);
    case.expect_read("the next load");
}

#[test]
fn progress_counts_the_same_bytes_with_and_without_packed_weights() {
    let case = Case::new(&llama(), None);
    let progress = || {
        let mut calls = Vec::new();
        Engine::load(&case.options(), &mut |done, all| {
            calls.push((done, all));
            true
        })
        .unwrap();
        (calls[0], *calls.last().unwrap())
    };
    let (first, last) = progress();
    assert!(first.0 == 0 && last.0 == last.1 && last.1 > 0);
    assert_eq!(progress(), (first, last));
}

#[test]
fn engines_that_save_concurrently_leave_one_complete_file() {
    let case = Case::new(&llama(), None);
    for _ in 0..5 {
        let (engines, barrier) = (4, Barrier::new(4));
        std::thread::scope(|scope| {
            for _ in 0..engines {
                scope.spawn(|| {
                    barrier.wait();
                    let report = case.load("concurrent saves");
                    let late = report.reason.contains("another engine");
                    assert!(report.form != PackedForm::Unsaved || late, "{report:?}");
                });
            }
        });
        case.expect_read("after concurrent saves");
        fs::remove_file(case.form()).unwrap();
    }
}

#[test]
fn an_engine_does_not_wait_for_another_process_that_saves() {
    let case = Case::new(&llama(), None);
    let form = case.save();
    fs::remove_file(&form).unwrap();
    let other = File::create(form.with_extension("unfinished")).unwrap();
    other.lock().unwrap();
    other.write_all_at(b"half", 0).unwrap();
    case.expect_unsaved("while another process saves", "another engine is writing it");
    drop(other); // killed
    assert_eq!(case.load("after the other process was killed").form, PackedForm::Saved);
    case.form();
}

/// The child process of the tests below, which end their process or change its limits.
#[test]
#[ignore = "run by other tests, in a separate process"]
fn child() {
    let dir = |name| PathBuf::from(std::env::var_os(name).unwrap());
    let options = options(&dir("PACKED_MODEL"), Some(&dir("PACKED_DIR")));
    if std::env::var_os("PACKED_KILL").is_some() {
        let _ = Engine::load(&options, &mut |done, all| if done < all / 2 { true } else { std::process::abort() });
        unreachable!("the model was loaded");
    }
    // A write beyond the limit would kill the process.
    let limit = libc::rlimit { rlim_cur: 2000, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the limit is initialized and applies to this process only.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &limit) }, 0);
    let (report, _) = load(&options);
    assert!(report.form == PackedForm::Unsaved && report.reason.contains("RLIMIT_FSIZE 2000"), "{report:?}");
}

fn child_of(case: &Case, kill: bool) -> bool {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "packed::child", "--ignored"]).env("PACKED_MODEL", &case.model.0).env("PACKED_DIR", &case.packed.0);
    if kill {
        command.env("PACKED_KILL", "1");
    }
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(kill || output.status.success(), "{text}");
    output.status.success()
}

#[test]
fn an_unfinished_file_of_a_killed_process_is_not_loaded() {
    let case = Case::new(&llama(), None);
    assert!(!child_of(&case, true), "the child process was not killed");
    let left = case.files();
    assert!(
        left.len() == 1 && left[0].extension().unwrap() == "unfinished" && fs::metadata(&left[0]).unwrap().len() > HEADER as u64,
        "{left:?}"
    );
    case.save();
    case.expect_read("the next load");
}

#[test]
fn a_packed_file_larger_than_the_file_size_limit_is_not_saved() {
    let case = Case::new(&llama(), None);
    assert!(child_of(&case, false));
    assert!(case.files().is_empty(), "{:?}", case.files());
}
