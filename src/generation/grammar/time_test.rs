//! Tests of what bounds the time of grammars in steps: pending changes, the pace of a grammar, and
//! its compilation.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::compile::{Compilations, PEAK};
use super::has;
use super::tests::{END, all_kinds, byte_grammars, lark};
use crate::error::Code;
use crate::generation::sampler::{Lane, uniform};
use crate::types::options::Grammar;

/// The changes of a random sequence, applied at once and with the next mask.
#[test]
fn pending_changes_have_the_masks_of_those_that_are_applied_at_once() {
    let grammars = byte_grammars();
    for grammar in all_kinds() {
        for seed in 0..20 {
            let (mut now, mut later) = (grammars.compile(&grammar).unwrap(), grammars.compile(&grammar).unwrap());
            let mut len = 0;
            for i in 0..30 {
                let random = |lane: u64, n: usize| (uniform(seed, 10 * i + lane, Lane::Token) * n as f64) as usize;
                let choices = now.mask().map_or(Vec::new(), |mask| (0..300).filter(|token| has(mask, *token)).collect::<Vec<u32>>());
                match random(0, 4) {
                    0 => {
                        let back = random(1, len + 1);
                        now.rewind(back).unwrap();
                        later.rewind_later(back).unwrap();
                        len -= back;
                    }
                    1 => {
                        let tokens = [choices.first().copied().unwrap_or(b'x' as u32), b'?' as u32];
                        let tokens = &tokens[..1 + random(1, 2)];
                        now.append(tokens).unwrap();
                        later.append_later(tokens).unwrap();
                        len += tokens.len();
                    }
                    _ if choices.is_empty() || choices == [END] => {}
                    _ => {
                        let token = choices[random(1, choices.len())];
                        now.advance(token).unwrap();
                        later.advance_later(token).unwrap();
                        len += 1;
                    }
                }
                if random(2, 3) == 0 {
                    let mut quick = later.fork().unwrap();
                    assert_eq!(later.mask().map(<[u32]>::to_vec), now.mask().map(<[u32]>::to_vec), "{grammar:?}");
                    assert!(later.has_mask() && later.is_complete() == now.is_complete());
                    if quick.try_mask() {
                        assert_eq!(quick.mask().map(<[u32]>::to_vec), now.mask().map(<[u32]>::to_vec), "{grammar:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_grammar_is_slow_from_a_long_mask_on_until_many_short_ones() {
    let mut constraint = byte_grammars().compile(&Grammar::Regex("a*".into())).unwrap();
    assert!(!constraint.is_slow());
    constraint.record_time(Duration::from_millis(2));
    let sharing = constraint.fork().unwrap();
    assert!(sharing.is_slow());
    (0..31).for_each(|_| constraint.record_time(Duration::ZERO));
    assert!(sharing.is_slow());
    constraint.record_time(Duration::ZERO);
    assert!(!sharing.is_slow());
    sharing.pace().begin_late();
    assert!(constraint.is_slow_or_late() && !constraint.is_slow());
    sharing.pace().end_late();
    assert!(!constraint.is_slow_or_late());
    constraint.advance_later(b'a' as u32).unwrap();
    assert!(!constraint.is_slow(), "one token of the output");
    assert!(constraint.try_mask());
    constraint.append_later(&[b'a' as u32]).unwrap();
    assert!(constraint.is_slow());
}

#[test]
fn concurrent_compilations_are_few_and_one_grammar_is_compiled_once() {
    let grammars = byte_grammars();
    let grammar =
        |i: usize| Grammar::JsonSchema(format!("{{\"enum\": [{}]}}", (0..300 + i).map(|i| i.to_string()).collect::<Vec<_>>().join(",")));
    let constraints: Vec<_> = std::thread::scope(|scope| {
        let compile = |i: usize| {
            let (grammars, grammar) = (&grammars, grammar(i / 3));
            scope.spawn(move || grammars.compile(&grammar).unwrap())
        };
        let threads: Vec<_> = (0..6).map(compile).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for same in constraints.chunks(3) {
        assert!(same.iter().all(|constraint| Arc::ptr_eq(&constraint.compiled, &same[0].compiled)), "one compilation for one grammar");
    }
    let peak = PEAK.load(Ordering::SeqCst);
    assert!((1..=Compilations::max()).contains(&peak), "{peak} compilations at the same time");
}

#[test]
fn a_grammar_that_exceeds_a_limit_with_its_first_token_is_refused() {
    let members: String = (0..1000).map(|i| format!("\"p{i}\": {{\"type\": \"integer\"}},")).collect();
    let grammar = Grammar::JsonSchema(format!("{{\"type\": \"object\", \"properties\": {{{members} \"last\": true}}}}"));
    let error = byte_grammars().compile(&grammar).err().unwrap();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert!(error.message().contains("items; max is 2000"), "{error}");
    // Another first token does not exceed it.
    let grammar = lark(&format!("start: \"b\" | \"a\" ({})", (0..2100).map(|i| format!("\"c{i}\"")).collect::<Vec<_>>().join(" | ")));
    let mut constraint = byte_grammars().compile(&grammar).unwrap();
    let error = constraint.fork().unwrap().advance(b'a' as u32).err();
    assert!(error.is_none() || error.is_some_and(|error| error.code() == Code::Capacity));
    constraint.advance(b'b' as u32).unwrap();
}
