//! The names in the JSON headers of sequence states and journals do not change with the names in
//! the code. To rename a field or a variant, keep its stored name with `#[serde(rename)]`. A change
//! of the stored names needs a new version of the format, and new files in tests/data/formats. A
//! new field needs `#[serde(default)]`, and a value in these files.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::observability::journal::records::Header;
use crate::types::options::{BatchingPolicy, Grammar, Isa, KvDtype, OrderPolicy, OutputKind, Preemption, WeightFormat};
use crate::types::sequence_state;

/// Checks that a stored header is read and written with the same names and values. The files have a
/// value for every optional field, so a field that is not read is written as null.
fn check<T: Serialize + DeserializeOwned>(stored: &str) {
    let read: T = serde_json::from_str(stored).expect("a stored name was renamed or removed");
    let written = serde_json::to_string_pretty(&read).unwrap();
    assert_eq!(written, stored.trim_end(), "the left side has the names that the code writes now");
}

#[test]
fn the_header_of_a_sequence_state_keeps_its_names() {
    check::<sequence_state::Header>(include_str!("../../tests/data/formats/sequence_state.json"));
}

#[test]
fn a_sequence_state_without_later_fields_is_read() {
    let later = [r#""prompt_logprobs_start": 4,"#, r#""prefill_progress": true,"#];
    let now = include_str!("../../tests/data/formats/sequence_state.json");
    let before = later.iter().fold(now.to_string(), |text, field| text.replace(field, ""));
    assert_ne!(before, now);
    let read: sequence_state::Header = serde_json::from_str(&before).unwrap();
    assert_eq!(read.params.prompt_logprobs_start, 0);
}

#[test]
fn the_header_of_a_journal_keeps_its_names() {
    check::<Header>(include_str!("../../tests/data/formats/journal.json"));
}

#[test]
fn the_variants_of_stored_options_keep_their_names() {
    #[derive(Serialize, Deserialize)]
    struct Variants {
        isa: Vec<Isa>,
        weight_format: Vec<WeightFormat>,
        kv_dtype: Vec<KvDtype>,
        preemption: Vec<Preemption>,
        order: Vec<OrderPolicy>,
        batching: Vec<BatchingPolicy>,
        output: Vec<OutputKind>,
        grammar: Vec<Grammar>,
    }
    let stored = include_str!("../../tests/data/formats/variants.json");
    check::<Variants>(stored);
    let variants: Variants = serde_json::from_str(stored).unwrap();
    assert_eq!((&variants.isa[..], &variants.kv_dtype[..]), (&Isa::ALL[..], &KvDtype::ALL[..]));
}
