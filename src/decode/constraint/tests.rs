use super::*;
use crate::error::Code;

/// One token per byte, then an end.
pub(crate) fn byte_grammars() -> Grammars {
    let tokens = (0..=255).map(|byte| vec![byte]).chain([b"<end>".to_vec()]).collect();
    let special = (0..257).map(|token| token == 256).collect();
    Grammars::new(Vocabulary { tokens, special, eos: vec![256] }).unwrap()
}

#[test]
fn tmp() {
    let g = byte_grammars();
    let mut c = g.compile(&Grammar::Choice(vec!["yes".into(), "no".into()])).unwrap();
    println!("{:?}", c.mask());
    assert_eq!(g.compile(&Grammar::Regex("(".into())).err().unwrap().code(), Code::InvalidArgument);
}
