use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::error::Code;

/// A file that the gguf package has written (tests/data/make_gguf.py).
fn reference() -> Gguf {
    Gguf::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/gguf_blocks.gguf")).unwrap()
}

fn read_all(file: &Gguf, name: &str) -> Vec<f32> {
    let tensor = file.tensor(name).unwrap();
    let mut numbers = vec![0.0; tensor.shape.iter().product()];
    file.read_f32(tensor, 0, &mut numbers).unwrap();
    numbers
}

#[test]
fn every_type_has_the_numbers_of_the_reference_bit_for_bit() {
    let file = reference();
    let mut types = 0;
    for (name, tensor) in file.tensors().filter(|(name, _)| !name.ends_with(".expected")) {
        let bits = |name: &str| read_all(&file, name).iter().map(|number| number.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(name), bits(&format!("{name}.expected")), "{name}");
        assert_eq!(name, tensor.kind.name());
        // A part of the tensor.
        let (first, mut part) = (256, [0.0; 512]);
        file.read_f32(tensor, first, &mut part).unwrap();
        assert_eq!(part.map(f32::to_bits)[..], bits(name)[first..first + 512], "{name}");
        types += 1;
    }
    assert_eq!(types, 15);
}

#[test]
fn values_are_those_that_were_written() {
    let metadata = reference().metadata;
    assert_eq!(metadata.whole("test.whole", 10).unwrap(), Some(7));
    assert_eq!(metadata.text("test.text").unwrap(), Some("text"));
    assert_eq!(metadata.get("test.float"), Some(&Value::Float(0.5)));
    assert_eq!(metadata.get("test.flag"), Some(&Value::Flag(true)));
    assert_eq!(metadata.get("test.integers"), Some(&Value::Integers(vec![-1, 2])));
    assert_eq!(metadata.get("test.floats"), Some(&Value::Floats(vec![0.25, 2.0])));
    assert_eq!(metadata.get("test.flags"), Some(&Value::Flags(vec![true, false])));
    assert_eq!(metadata.get("test.texts"), Some(&Value::Texts(vec!["one".into(), String::new(), "drei".into()])));
    assert_eq!(metadata.whole("test.missing", 10).unwrap(), None);
    assert!(metadata.whole("test.whole", 6).unwrap_err().message().contains("test.whole is 7; must be 0 to 6"));
    assert!(metadata.text("test.whole").unwrap_err().message().contains("is not a text"));
}

#[test]
fn a_scale_that_is_not_finite_is_an_error() {
    for (kind, at) in [(BlockType::Q4_0, 0), (BlockType::Q5_1, 2), (BlockType::Q4_K, 0), (BlockType::Q3_K, 108), (BlockType::Q6_K, 208)] {
        for bits in [0x7C00u16, 0xFC00, 0x7E01] {
            let mut block = vec![0; kind.block_bytes()];
            block[at..at + 2].copy_from_slice(&bits.to_le_bytes());
            let error = blocks::unpack(kind, &block, &mut vec![0.0; kind.block_len()]).unwrap_err();
            assert!(error.code() == Code::Model && error.message().contains("a scale of a block is"), "{kind:?}: {error}");
        }
    }
    let nan = blocks::unpack(BlockType::Mxfp4, &[255; 17], &mut [0.0; 32]).unwrap_err();
    assert!(nan.message().contains("NaN"));
}

/// The parts of a small file, which a test may change.
struct Parts {
    version: u32,
    tensors: u64,
    values: u64,
    /// Keys, types and values.
    metadata: Vec<u8>,
    /// Descriptions of tensors.
    descriptions: Vec<u8>,
    data: Vec<u8>,
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

fn whole(key: &str, number: u32) -> Vec<u8> {
    [text(key), 4u32.to_le_bytes().into(), number.to_le_bytes().into()].concat()
}

fn list(key: &str, kind: u32, count: u64, items: &[u8]) -> Vec<u8> {
    [text(key), 9u32.to_le_bytes().into(), kind.to_le_bytes().into(), count.to_le_bytes().into(), items.into()].concat()
}

/// `sizes` begin with the innermost one, as in files.
fn description(name: &str, sizes: &[u64], kind: u32, offset: u64) -> Vec<u8> {
    let mut bytes = [text(name), (sizes.len() as u32).to_le_bytes().into()].concat();
    sizes.iter().for_each(|size| bytes.extend(size.to_le_bytes()));
    bytes.extend(kind.to_le_bytes());
    bytes.extend(offset.to_le_bytes());
    bytes
}

impl Parts {
    /// Two tensors: 2 x 32 numbers in Q8_0, and 8 numbers in F32.
    fn good() -> Parts {
        Parts {
            version: 3,
            tensors: 2,
            values: 3,
            metadata: [whole("a", 1), list("b", 8, 2, &[text("x"), text("yz")].concat()), list("c", 6, 1, &0.5f32.to_le_bytes())].concat(),
            descriptions: [description("q", &[32, 2], 8, 0), description("f", &[8], 0, 96)].concat(),
            data: vec![0; 128],
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let counts = [self.tensors.to_le_bytes(), self.values.to_le_bytes()].concat();
        let mut bytes = [b"GGUF", &self.version.to_le_bytes()[..], &counts, &self.metadata, &self.descriptions].concat();
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        bytes.extend(&self.data);
        bytes
    }
}

fn open(bytes: &[u8]) -> Result<Gguf> {
    static FILES: AtomicUsize = AtomicUsize::new(0);
    let number = FILES.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("pagedllm-gguf-{}-{number}.gguf", std::process::id()));
    File::create(&path).unwrap().write_all(bytes).unwrap();
    let file = Gguf::open(&path);
    std::fs::remove_file(&path).unwrap();
    file
}

fn refused(change: impl Fn(&mut Parts)) -> Error {
    let mut parts = Parts::good();
    change(&mut parts);
    open(&parts.bytes()).unwrap_err()
}

#[test]
fn impossible_headers_are_refused_with_the_number_and_the_limit() {
    assert_eq!(open(&Parts::good().bytes()).unwrap().tensor("q").unwrap().shape, [2, 32]);
    let huge = 1u64 << 60;
    let one = |key, kind: u32, value: &[u8]| [text(key), kind.to_le_bytes().into(), value.into()].concat();
    type Change<'a> = (&'a str, Code, Box<dyn Fn(&mut Parts) + 'a>);
    let metadata =
        |bytes: Vec<u8>| -> Box<dyn Fn(&mut Parts)> { Box::new(move |parts| (parts.values, parts.metadata) = (1, bytes.clone())) };
    let described =
        |bytes: Vec<u8>| -> Box<dyn Fn(&mut Parts)> { Box::new(move |parts| (parts.tensors, parts.descriptions) = (1, bytes.clone())) };
    let cases: Vec<Change> = vec![
        ("GGUF version 1; supported are 2 and 3", Code::Unsupported, Box::new(|parts| parts.version = 1)),
        ("GGUF version 4; supported are 2 and 3", Code::Unsupported, Box::new(|parts| parts.version = 4)),
        ("GGUF version 3 in big-endian order", Code::Unsupported, Box::new(|parts| parts.version = 3u32.swap_bytes())),
        ("the list of tensors at byte 24 has 1152921504606846976 items", Code::Model, Box::new(|parts| parts.tensors = huge)),
        ("the list of values at byte 24 has 1152921504606846976 items", Code::Model, Box::new(|parts| parts.values = huge)),
        (
            "has 1099511627776 items of at least 1 bytes",
            Code::Model,
            metadata([(1u64 << 40).to_le_bytes().into(), b"key".to_vec()].concat()),
        ),
        ("has 1099511627776 items of at least 1 bytes", Code::Model, metadata(one("k", 8, &(1u64 << 40).to_le_bytes()))),
        ("k at byte", Code::Model, metadata(list("k", 6, huge, &[]))),
        ("k at byte", Code::Model, metadata(list("k", 8, u64::MAX, &[]))),
        ("k is a list of lists", Code::Unsupported, metadata(list("k", 9, 1, &[0; 12]))),
        ("k is a list of the type 13", Code::Model, metadata(list("k", 13, 1, &[0; 12]))),
        ("k has the type 99", Code::Model, metadata(one("k", 99, &[0; 8]))),
        ("k is a bool with the byte 2", Code::Model, metadata(one("k", 7, &[2]))),
        ("is not UTF-8", Code::Model, metadata(one("k", 8, &[2, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF]))),
        ("an item of k is 18446744073709551615", Code::Model, metadata(list("k", 10, 1, &u64::MAX.to_le_bytes()))),
        ("a has two values", Code::Model, Box::new(|parts| (parts.values, parts.metadata) = (2, [whole("a", 1), whole("a", 2)].concat()))),
        ("general.alignment is 48; must be a power of two", Code::Model, metadata(whole("general.alignment", 48))),
        ("general.alignment is 0; must be a power of two", Code::Model, metadata(whole("general.alignment", 0))),
        ("tensor q is in the file twice", Code::Model, Box::new(|parts| parts.descriptions = description("q", &[32], 0, 0).repeat(2))),
        ("it has 0 dimensions; must be 1 to 4", Code::Model, described(description("t", &[], 0, 0))),
        ("it has 5 dimensions; must be 1 to 4", Code::Model, described(description("t", &[1; 5], 0, 0))),
        ("a dimension is 0", Code::Model, described(description("t", &[32, 0], 0, 0))),
        ("a dimension is 1152921504606846976", Code::Model, described(description("t", &[32, huge], 0, 0))),
        ("tensor t: its storage type is 16; supported are F32, F16", Code::Unsupported, described(description("t", &[256], 16, 0))),
        ("its rows have 48 numbers, which is no multiple of 32 (Q8_0)", Code::Model, described(description("t", &[48], 8, 0))),
        ("its rows have 32 numbers, which is no multiple of 256 (Q4_K)", Code::Model, described(description("t", &[32, 8], 12, 0))),
        ("its data begin at 8, which is no multiple of 32", Code::Model, described(description("t", &[8], 0, 8))),
        ("tensor t has 256 bytes at 0 after the header of", Code::Model, described(description("t", &[64], 0, 0))),
        ("tensor t has 32 bytes at 18446744073709551584", Code::Model, described(description("t", &[8], 0, u64::MAX - 31))),
        (
            "tensors q and f overlap",
            Code::Model,
            Box::new(|parts| parts.descriptions = [description("q", &[32, 2], 8, 0), description("f", &[8], 0, 64)].concat()),
        ),
    ];
    for (part, code, change) in &cases {
        let error = refused(change);
        assert!(error.code() == *code && error.message().contains(part), "{part}: {error}");
    }
    assert!(open(b"").unwrap_err().message().contains("the magic"));
    assert!(open(b"GGML\x03\0\0\0").unwrap_err().message().contains("bad magic"));
}

#[test]
fn a_file_that_ends_too_early_is_an_error_wherever_it_ends() {
    let bytes = Parts::good().bytes();
    for len in 0..bytes.len() {
        assert!(open(&bytes[..len]).is_err(), "{len} of {} bytes", bytes.len());
    }
}

/// A file with random bytes is opened or refused, and its tensors can be read or not. A panic or an
/// abort fails this test.
#[test]
fn random_changes_never_panic() {
    let (good, reference) = (Parts::good().bytes(), std::fs::read("tests/data/gguf_blocks.gguf").unwrap());
    // A linear congruential generator, of which the high bits count.
    let mut state = 1u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
        (state >> 33) as usize % below
    };
    for round in 0..2000 {
        let mut bytes = if round % 10 == 0 { reference.clone() } else { good.clone() };
        let header = bytes.len().min(3000);
        for _ in 0..1 + round % 4 {
            let at = random(header);
            bytes[at] = [0, 1, 0x7F, 0x80, 0xFF, bytes[at] ^ 1, bytes[at].wrapping_add(1)][random(7)];
        }
        let Ok(file) = open(&bytes) else { continue };
        for (_, tensor) in file.tensors() {
            let mut numbers = vec![0.0; tensor.shape.iter().product()];
            let _ = file.read_f32(tensor, 0, &mut numbers);
        }
    }
}

/// A file of the architecture qwen2 with one changed value or tensor.
fn model_with(
    change: impl Fn(&mut std::collections::BTreeMap<String, Value>, &mut HashMap<String, Tensor>),
) -> Result<serde_json::Map<String, serde_json::Value>> {
    let mut file = Gguf::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/gguf_qwen2/model.gguf"))?;
    change(&mut file.metadata.0, &mut file.tensors);
    model::config(&file)
}

#[test]
fn a_model_that_is_not_supported_is_refused_with_the_key_and_the_value() {
    let config = model_with(|_, _| ()).unwrap();
    assert_eq!((&config["architectures"][0], &config["tie_word_embeddings"]), (&"Qwen2ForCausalLM".into(), &true.into()));
    let text = |value: &str| Value::Text(value.into());
    for (key, value, part) in [
        (
            "general.architecture",
            text("bert"),
            "general.architecture is bert; supported in GGUF files are llama, qwen2, qwen3, qwen2moe, qwen3moe, gemma,",
        ),
        ("general.architecture", Value::Integer(1), "general.architecture is not a text"),
        ("qwen2.expert_count", Value::Integer(8), "qwen2.expert_count is 8; GGUF files of qwen2 must have none"),
        ("qwen2.rope.dimension_count", Value::Integer(32), "qwen2.rope.dimension_count is 32; this architecture supports only 64"),
        ("qwen2.attention.sliding_window", Value::Integer(32), "sliding_window is 32; this architecture supports only 128"),
        ("qwen2.block_count", Value::Integer(-1), "qwen2.block_count is -1; must be 0 to"),
        ("qwen2.block_count", text("x"), "qwen2.block_count is not a whole number"),
        ("qwen2.rope.freq_base", Value::Float(f64::NAN), "qwen2.rope.freq_base is not a finite number"),
        (
            "qwen2.rope.dimension_sections",
            Value::Integers(vec![8, 12, 12, 0]),
            "qwen2.rope.dimension_sections is Integers([8, 12, 12, 0]); positions of several dimensions are not supported",
        ),
        ("qwen2.rope.scaling.type", text("su"), "qwen2.rope.scaling.type is su; supported are none, linear, yarn"),
    ] {
        let error = model_with(|metadata, _| drop(metadata.insert(key.into(), value.clone()))).unwrap_err();
        assert!(error.message().contains(part), "{key}: {error}");
    }
    for key in ["general.architecture", "qwen2.embedding_length", "qwen2.attention.head_count", "qwen2.context_length"] {
        let error = model_with(|metadata, _| drop(metadata.remove(key))).unwrap_err();
        assert!(error.message().contains(&format!("{key} is missing")), "{error}");
    }
    let error = model_with(|_, tensors| drop(tensors.remove("token_embd.weight"))).unwrap_err();
    assert!(error.message().contains("token_embd.weight is missing"), "{error}");
}

/// Like `model_with`, as another architecture with the values of qwen2.
fn model_as(
    architecture: &str,
    change: impl Fn(&mut std::collections::BTreeMap<String, Value>),
) -> Result<serde_json::Map<String, serde_json::Value>> {
    model_with(|metadata, _| {
        for (key, value) in metadata.clone() {
            metadata.insert(key.replace("qwen2.", &format!("{architecture}.")), value);
        }
        metadata.insert("general.architecture".into(), Value::Text(architecture.into()));
        change(metadata);
    })
}

#[test]
fn forms_of_a_family_that_files_do_not_name_follow_from_its_values() {
    let with_window = |architecture: &str, key: &str, value: i128| {
        model_as(architecture, |metadata| {
            metadata.insert(format!("{architecture}.attention.sliding_window"), Value::Integer(20));
            metadata.insert(format!("{architecture}.{key}"), Value::Integer(value));
        })
    };
    // Models of 27 billion parameters scale scores by their width per head, 256 / 4, and others by
    // key_length.
    for (architecture, layers, scalar) in [("gemma2", 46, 64), ("gemma2", 26, 32), ("gemma3", 62, 64), ("gemma3", 46, 32)] {
        let config = model_as(architecture, |metadata| {
            metadata.insert(format!("{architecture}.attention.sliding_window"), Value::Integer(20));
            metadata.insert(format!("{architecture}.block_count"), Value::Integer(layers));
            for key in ["key_length", "value_length"] {
                metadata.insert(format!("{architecture}.attention.{key}"), Value::Integer(32));
            }
            metadata.insert(format!("{architecture}.rope.dimension_count"), Value::Integer(32));
        });
        assert_eq!(config.unwrap()["query_pre_attn_scalar"], scalar, "{architecture} with {layers} layers");
    }
    assert_eq!(with_window("gemma3", "attention.sliding_window_pattern", 6).unwrap()["sliding_window"], 20);
    let refused = |config: Result<serde_json::Map<_, _>>| config.unwrap_err().message().to_string();
    assert!(refused(model_as("gemma3", |_| ())).contains("gemma3.attention.sliding_window is missing"));
    assert!(refused(with_window("cohere2", "attention.sliding_window_pattern", 1)).contains("sliding_window_pattern is 1; this"));
    let sigmoid = model_as("qwen2moe", |metadata| {
        for key in ["expert_count", "expert_gating_func"] {
            metadata.insert(format!("qwen2moe.{key}"), Value::Integer(2));
        }
    });
    assert!(refused(sigmoid).contains("qwen2moe.expert_gating_func is 2; files of qwen2moe must have 1 (softmax)"));
    let yarn = |architecture: &str, factor: f64| {
        model_as(architecture, |metadata| {
            let mut insert = |key: &str, value| drop(metadata.insert(format!("{architecture}.{key}"), value));
            insert("expert_count", Value::Integer(if architecture == "deepseek2" { 4 } else { 0 }));
            insert("expert_used_count", Value::Integer(2));
            insert("rope.scaling.type", Value::Text("yarn".into()));
            insert("rope.scaling.original_context_length", Value::Integer(32));
            insert("rope.scaling.yarn_log_multiplier", Value::Float(0.0625));
            insert("rope.scaling.attn_factor", Value::Float(factor));
        })
    };
    let scales = |architecture| {
        let config = yarn(architecture, 1.0).unwrap();
        ["mscale", "mscale_all_dim"].map(|name| config["rope_scaling"][name].as_f64().unwrap())
    };
    assert_eq!((scales("qwen2"), scales("deepseek2")), ([1.0, 0.0625], [0.625, 0.625]));
    assert!(refused(yarn("qwen2", 0.5)).contains("qwen2.rope.scaling.attn_factor is 0.5; with YaRN, only 1 is supported"));
    // Half of each head rotates.
    let part = model_as("phi2", |metadata| drop(metadata.insert("phi2.rope.dimension_count".into(), Value::Integer(32))));
    assert_eq!((64.0 * part.unwrap()["partial_rotary_factor"].as_f64().unwrap()) as usize, 32);
    // Without a scale of its own, Granite has the usual one.
    assert_eq!(model_as("granite", |_| ()).unwrap()["attention_multiplier"], 0.125);
}

#[test]
fn names_are_those_of_hugging_face() {
    let mut file = Gguf::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/gguf_qwen2/model.gguf")).unwrap();
    let vector = file.tensors["output_norm.weight"].clone();
    let names = |file: &mut Gguf, name: &str, shape: &[usize]| {
        file.tensors = HashMap::from([(name.to_string(), Tensor { shape: shape.into(), bytes: 24, ..vector.clone() })]);
        let mut names: Vec<_> = model::tensors(file).unwrap().into_iter().map(|(name, tensor)| (name, tensor.shape)).collect();
        names.sort();
        names
    };
    for (name, expected) in [
        ("token_embd.weight", "embed_tokens.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.12.attn_q.bias", "layers.12.self_attn.q_proj.bias"),
        ("blk.0.unknown.weight", "layers.0.unknown.weight"),
        ("rope_freqs.weight", "rope_freqs.weight"),
        ("blk", "blk"),
    ] {
        assert_eq!(names(&mut file, name, &[6]), [(expected.to_string(), vec![6])]);
    }
    // Queries, keys and values in one tensor, where Hugging Face has three.
    for (key, number) in [("head_count", 2), ("head_count_kv", 1), ("key_length", 2)] {
        file.metadata.0.insert(format!("qwen2.attention.{key}"), Value::Integer(number));
    }
    let projection = |which: &str, rows| (format!("layers.0.self_attn.{which}_proj.bias"), vec![rows]);
    let fused = names(&mut file, "blk.0.attn_qkv.bias", &[8]);
    assert_eq!(fused, [projection("k", 2), projection("q", 4), projection("v", 2)]);
    let offset = |which: &str| {
        let found = model::tensors(&file).unwrap().into_iter().find(|(name, _)| name.contains(which));
        found.unwrap().1.offset - vector.offset
    };
    assert_eq!([offset("q_proj"), offset("k_proj"), offset("v_proj")], [0, 12, 18]);
    file.metadata.0.insert("qwen2.attention.head_count".into(), Value::Integer(3));
    let error = model::tensors(&file).unwrap_err();
    assert!(error.message().contains("blk.0.attn_qkv.bias: 8 rows in F32; the metadata require [6, 2, 2]"), "{error}");
    let values: Vec<_> = file.metadata.0.clone().into_iter().collect();
    file.metadata.0.extend(values.into_iter().map(|(key, value)| (key.replace("qwen2.", "qwen2moe."), value)));
    file.metadata.0.insert("general.architecture".into(), Value::Text("qwen2moe".into()));
    file.metadata.0.insert("qwen2moe.expert_count".into(), Value::Integer(2));
    let mut many = file.tensors["blk.0.attn_qkv.bias"].clone();
    many.shape = vec![3, 1, 2];
    file.tensors = HashMap::from([("blk.1.ffn_up_exps.weight".to_string(), many)]);
    let error = model::tensors(&file).unwrap_err();
    assert!(error.message().contains("blk.1.ffn_up_exps.weight: 3 experts or heads; the metadata have 2"), "{error}");
    let expert = |index: usize| (format!("layers.1.mlp.experts.{index}.up_proj.weight"), vec![1, 3]);
    assert_eq!(names(&mut file, "blk.1.ffn_up_exps.weight", &[2, 1, 3]), [expert(0), expert(1)]);
    let matrix = |index: usize, name: &str| (format!("layers.1.mlp.experts.{index}.{name}_proj.weight"), vec![1, 3]);
    let both = [matrix(0, "gate"), matrix(0, "up"), matrix(1, "gate"), matrix(1, "up")];
    assert_eq!(names(&mut file, "blk.1.ffn_gate_up_exps.weight", &[2, 2, 3]), both);
    let gate = ("layers.1.mlp.shared_expert_gate.weight".to_string(), vec![1, 6]);
    assert_eq!(names(&mut file, "blk.1.ffn_gate_inp_shexp.weight", &[6]), [gate]);
    let router = ("layers.1.mlp.gate.weight".to_string(), vec![2, 3]);
    assert_eq!(names(&mut file, "blk.1.ffn_gate_inp.weight", &[2, 3]), [router]);
}

#[test]
fn a_directory_with_one_file_is_that_file_and_with_two_an_error() {
    let dir = std::env::temp_dir().join(format!("pagedllm-gguf-find-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    assert_eq!(model::find(&dir).unwrap(), None);
    let one = dir.join("one.gguf");
    std::fs::write(&one, "").unwrap();
    assert_eq!(model::find(&dir).unwrap().as_deref(), Some(&*one));
    assert_eq!(model::find(&one).unwrap().as_deref(), Some(&*one));
    std::fs::write(dir.join("two.gguf"), "").unwrap();
    assert!(model::find(&dir).unwrap_err().message().contains("has 2 GGUF files; set model_path to one of them"));
    std::fs::write(dir.join("config.json"), "{}").unwrap();
    assert_eq!(model::find(&dir).unwrap(), None);
    std::fs::remove_dir_all(&dir).unwrap();
}

/// The words are those of the published tokenizers of GPT-4o, Mistral NeMo, DeepSeek V3, LLaMA 3,
/// Qwen 2.5 and Command R+, and those of llama.cpp, in the characters of byte level tokens.
#[test]
fn texts_are_cut_into_the_words_of_the_published_tokenizers_and_of_llama_cpp() {
    are_cut_into(include_str!("../../../tests/data/gguf_words.json"));
    are_cut_into(include_str!("../../../tests/data/gguf_words_llama_cpp.json"));
}

fn are_cut_into(cases: &str) {
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, PreTokenizerWrapper};
    let cases: serde_json::Value = serde_json::from_str(cases).unwrap();
    for case in cases["words"].as_array().unwrap() {
        let mut metadata = tokenizer("gpt2");
        metadata.0.insert("tokenizer.ggml.pre".into(), Value::Text(case["pre"].as_str().unwrap().into()));
        let document = text::documents(&metadata).unwrap().tokenizer;
        let words: PreTokenizerWrapper = serde_json::from_value(document["pre_tokenizer"].clone()).unwrap();
        for (text, expected) in cases["texts"].as_array().unwrap().iter().zip(case["words"].as_array().unwrap()) {
            let mut pieces = PreTokenizedString::from(text.as_str().unwrap());
            words.pre_tokenize(&mut pieces).unwrap();
            let found: Vec<_> = pieces.get_splits(OffsetReferential::Original, OffsetType::Byte).into_iter().map(|piece| piece.0).collect();
            assert_eq!(serde_json::json!(found), *expected, "{}: {text}", case["pre"]);
        }
    }
}

/// The metadata of a tokenizer with the tokens a, b and ab.
fn tokenizer(kind: &str) -> Metadata {
    let texts = |texts: &[&str]| Value::Texts(texts.iter().map(|text| text.to_string()).collect());
    let values = [
        ("tokenizer.ggml.model", Value::Text(kind.into())),
        ("tokenizer.ggml.pre", Value::Text("qwen2".into())),
        ("tokenizer.ggml.tokens", texts(&["a", "b", "ab", "<s>"])),
        ("tokenizer.ggml.token_type", Value::Integers(vec![1, 1, 1, 3])),
        ("tokenizer.ggml.merges", texts(&["a b"])),
        ("tokenizer.ggml.scores", Value::Floats(vec![0.0, 0.0, 1.0, 0.0])),
        ("tokenizer.ggml.bos_token_id", Value::Integer(3)),
    ];
    Metadata(values.into_iter().map(|(key, value)| (key.to_string(), value)).collect())
}

#[test]
fn a_tokenizer_that_is_not_supported_is_refused_with_the_key_and_the_value() {
    assert_eq!(text::documents(&tokenizer("gpt2")).unwrap().config["bos_token"], "<s>");
    let refused = |kind: &str, key: &str, value: Option<Value>| {
        let mut metadata = tokenizer(kind);
        let _ = match value {
            Some(value) => metadata.0.insert(key.into(), value),
            None => metadata.0.remove(key),
        };
        text::documents(&metadata).unwrap_err().message().to_string()
    };
    let words = |text: &str| Some(Value::Text(text.into()));
    for (kind, key, value, part) in [
        ("rwkv", "", words(""), "tokenizer.ggml.model is rwkv; supported are gpt2, llama, bert"),
        ("bert", "", words(""), "tokenizer.ggml.unknown_token_id is missing"),
        ("bert", "tokenizer.ggml.unknown_token_id", Some(Value::Integer(0)), "add_sep_token is true, and the file has no seperator token"),
        ("gpt2", "tokenizer.ggml.model", None, "tokenizer.ggml.model is missing"),
        ("gpt2", "tokenizer.ggml.tokens", Some(Value::Integer(1)), "tokenizer.ggml.tokens is not a list of texts"),
        ("gpt2", "tokenizer.ggml.tokens", Some(Value::Texts(vec![])), "tokenizer.ggml.tokens is not a list of texts, or has none"),
        ("gpt2", "tokenizer.ggml.token_type", Some(Value::Integers(vec![1])), "token_type is not a list of 4 whole numbers"),
        ("gpt2", "tokenizer.ggml.merges", None, "tokenizer.ggml.merges is not a list of texts"),
        ("gpt2", "tokenizer.ggml.merges", Some(Value::Texts(vec!["ab".into()])), "merges has ab, which is no pair of tokens"),
        ("gpt2", "tokenizer.ggml.pre", words("kimi-k2"), "tokenizer.ggml.pre is kimi-k2; supported are gpt-2, phi-2"),
        ("gpt2", "tokenizer.ggml.pre", None, "tokenizer.ggml.pre is default; supported are"),
        ("gpt2", "tokenizer.ggml.bos_token_id", Some(Value::Integer(4)), "tokenizer.ggml.bos_token_id is 4; must be 0 to 3"),
        ("gpt2", "tokenizer.ggml.add_eos_token", Some(Value::Flag(true)), "add_eos_token is true, and the file has no eos token"),
        ("gpt2", "tokenizer.ggml.add_bos_token", Some(Value::Integer(1)), "tokenizer.ggml.add_bos_token is not a bool"),
        ("llama", "tokenizer.ggml.bos_token_id", None, "add_bos_token is true, and the file has no bos token"),
        ("llama", "tokenizer.ggml.scores", Some(Value::Floats(vec![0.0])), "tokenizer.ggml.scores is not a list of 4 numbers"),
    ] {
        let message = refused(kind, key, value);
        assert!(message.contains(part), "{key}: {message}");
    }
}

#[test]
fn a_split_model_is_opened_by_its_first_file() {
    let dir = std::env::temp_dir().join(format!("pagedllm-gguf-split-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let write = |name: &str, index: u32, count: u32, tensor: &str| {
        let parts = Parts {
            tensors: 1,
            values: 2,
            metadata: [whole("split.no", index), whole("split.count", count)].concat(),
            descriptions: description(tensor, &[8], 0, 0),
            data: [index as f32; 8].iter().flat_map(|number| number.to_le_bytes()).collect(),
            ..Parts::good()
        };
        std::fs::write(dir.join(name), parts.bytes()).unwrap();
    };
    let (one, two) = ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf");
    write(one, 0, 2, "a");
    write(two, 1, 2, "b");
    assert_eq!(model::find(&dir).unwrap(), Some(dir.join(one)));
    let file = Gguf::open(&dir.join(one)).unwrap();
    assert_eq!((read_all(&file, "a"), read_all(&file, "b")), (vec![0.0; 8], vec![1.0; 8]));
    let refused = |name: &str| Gguf::open(&dir.join(name)).unwrap_err().message().to_string();
    assert!(refused(two).contains("is number 2 of 2 of a split model, and must be number 1 of 2; set model_path to the first file"));
    write(two, 1, 2, "a");
    assert!(refused(one).contains("tensor a is also in another file"));
    write(two, 0, 2, "b");
    assert!(refused(one).contains("must be number 2 of 2"));
    std::fs::remove_file(dir.join(two)).unwrap();
    assert!(refused(one).contains("m-00002-of-00002.gguf: not found"));
    write("other.gguf", 0, 2, "a");
    assert!(refused("other.gguf").contains("must end with -00001-of-00002.gguf"));
    write(one, 0, 100_000, "a");
    assert!(refused(one).contains("split.count is 100000; must be 0 to 99999"));
    std::fs::remove_dir_all(&dir).unwrap();
}
