use super::*;
use crate::error::Code;
use crate::generation::sampler::{Lane, log_softmax, uniform};

const NONE: f32 = f32::NEG_INFINITY;

/// Log probabilities that depend only on the last token. The first row is the prompt's.
struct Table(Vec<Vec<f32>>);

impl Table {
    fn random(seed: u64, vocab: usize) -> Table {
        let row = |last: usize| {
            let logits: Vec<f32> = (0..vocab).map(|token| 4.0 * uniform(seed, (last * vocab + token) as u64, Lane::Token) as f32).collect();
            let mut row = vec![0.0; vocab];
            log_softmax(&logits, &mut row);
            row
        };
        Table((0..=vocab).map(row).collect())
    }

    fn after(&self, tokens: &[u32]) -> &[f32] {
        &self.0[tokens.last().map_or(0, |&token| token as usize + 1)]
    }
}

fn params(width: u32) -> BeamParams {
    BeamParams { width, ..Default::default() }
}

/// The tokens of each slot, as a scheduler holds them.
type Slots = Vec<Option<Vec<u32>>>;

fn advance(slots: &mut Slots, step: &BeamStep) {
    step.dropped.iter().for_each(|&slot| slots[slot] = None);
    for next in step.next.iter().filter(|next| next.slot != next.parent) {
        assert!(slots[next.slot].is_none(), "slot {} is taken", next.slot);
        slots[next.slot] = slots[next.parent].clone();
    }
    // Forks precede the tokens: a parent's own token does not belong to its other children.
    step.next.iter().for_each(|next| slots[next.slot].as_mut().unwrap().push(next.token));
}

/// Runs a search to its end, or for `steps` steps. Calls `look` before each commit with the search
/// and the step.
fn run(search: &mut BeamSearch, table: &Table, steps: usize, mut look: impl FnMut(&BeamSearch, &BeamStep)) {
    let (mut scratch, mut step) = (BeamScratch::default(), BeamStep::default());
    let mut slots: Slots = vec![None; search.params.width as usize];
    slots[0] = Some(Vec::new());
    for _ in 0..steps {
        if search.is_done() {
            break;
        }
        let rows: Vec<f32> = slots.iter().flat_map(|slot| table.after(slot.as_deref().unwrap_or_default())).copied().collect();
        search.decide(&rows, &mut |_, _| Ok(()), &mut scratch, &mut step).unwrap();
        look(search, &step);
        search.commit(&step).unwrap();
        advance(&mut slots, &step);
        assert_eq!(search.is_done(), step.done);
        let mut tokens = Vec::new();
        for beam in search.running() {
            search.tokens_of(beam, &mut tokens).unwrap();
            assert_eq!(Some(&tokens), slots[beam.slot].as_ref(), "forks and appends gave slot {} its tokens", beam.slot);
        }
        assert_eq!(slots.iter().flatten().count(), search.running().count());
    }
}

fn found(params: &BeamParams, n: usize, eos: &[u32], max: usize, table: &Table) -> Vec<Hypothesis> {
    let mut search = BeamSearch::new(params, n, eos, max).unwrap();
    run(&mut search, table, usize::MAX, |_, _| ());
    search.best().unwrap()
}

/// Returns every sequence that ends with an end token or at the maximum length, with its sum.
fn every_sequence(table: &Table, eos: &[u32], max: usize) -> Vec<(Vec<u32>, f32)> {
    let (mut all, mut open) = (Vec::new(), vec![(Vec::new(), 0.0)]);
    while let Some((tokens, score)) = open.pop() {
        for (token, logprob) in table.after(&tokens).iter().enumerate() {
            let mut longer: Vec<u32> = tokens.clone();
            longer.push(token as u32);
            let ended = eos.contains(&(token as u32)) || longer.len() == max;
            if ended { &mut all } else { &mut open }.push((longer, score + logprob));
        }
    }
    all
}

#[test]
fn a_width_that_holds_all_sequences_finds_the_best_one() {
    for seed in 0..20 {
        let table = Table::random(seed, 4);
        for length_penalty in [-1.0, 0.0, 1.0, 2.0] {
            let params = BeamParams { length_penalty, early_stopping: EarlyStopping::Never, ..params(64) };
            let mut expected = every_sequence(&table, &[1], 3);
            expected.iter_mut().for_each(|(tokens, score)| *score /= (tokens.len() as f32).powf(length_penalty));
            expected.sort_by(|a, b| b.1.total_cmp(&a.1));
            let best = found(&params, 20, &[1], 3, &table);
            assert_eq!(best.len(), 20);
            for (best, (tokens, score)) in best.iter().zip(&expected) {
                assert_eq!(&best.tokens, tokens, "seed {seed}, length penalty {length_penalty}");
                assert!((best.score - score).abs() < 1e-5 * score.abs().max(1.0), "{} {score}", best.score);
                let ended = if best.tokens.ends_with(&[1]) { Ended::AtEos } else { Ended::AtLength };
                assert_eq!(best.ended, ended);
                let by_rows: Vec<f32> = (0..tokens.len()).map(|i| table.after(&tokens[..i])[tokens[i] as usize]).collect();
                assert_eq!(best.logprobs, by_rows);
            }
        }
    }
}

#[test]
fn the_best_candidates_equal_those_of_a_full_sort() {
    for seed in 0..40 {
        // Few distinct values, so that many are equal.
        let row = |beam: u64| -> Vec<f32> {
            (0..300).map(|i| -(uniform(seed, 300 * beam + i, Lane::Token) * 40.0).floor() as f32 / 8.0).collect()
        };
        let (rows, scores) = ([row(0), row(1), row(2)], [-0.5, -0.75, -0.125]);
        let mut all = Vec::new();
        for (beam, row) in rows.iter().enumerate() {
            for (token, &logprob) in row.iter().enumerate() {
                all.push((scores[beam] + logprob, beam, token as u32));
            }
        }
        all.sort_by(|a, b| b.0.total_cmp(&a.0)); // stable sort: equals keep the order of beams and tokens
        for count in [1, 2, 9, 64, 1000] {
            let mut best = Best::default();
            best.start(count).unwrap();
            (0..3).for_each(|beam| best.offer(beam, scores[beam], &rows[beam]));
            let found: Vec<_> = best.ranked().iter().map(|c| (c.score, c.beam, c.token)).collect();
            assert_eq!(found, all[..count.min(all.len())], "seed {seed}, {count} requested");
        }
    }
}

#[test]
fn a_step_with_many_end_tokens_equals_a_full_sort() {
    let mut continued = 0;
    for seed in 0..200u64 {
        // Few distinct values, so that many are equal.
        let value = |i: u64| -(uniform(seed, i, Lane::Token) * 20.0).floor() as f32 / 4.0;
        let (width, vocab) = (2 + seed % 7, 60);
        let eos: Vec<u32> = (0..seed % 50).map(|i| (uniform(seed, 5000 + i, Lane::Xtc) * 70.0) as u32).collect();
        let mut search = BeamSearch::new(&params(width as u32), 1, &eos, 9).unwrap();
        let (mut scratch, mut step) = (BeamScratch::default(), BeamStep::default());
        for round in 0..4 {
            let rows: Vec<f32> = (0..width * vocab).map(|i| value(1000 * round + i)).collect();
            let running: Vec<Beam> = search.running().copied().collect();
            let mut all = Vec::new();
            for beam in &running {
                let row = &rows[beam.slot * vocab as usize..][..vocab as usize];
                all.extend(row.iter().enumerate().map(|(token, logprob)| (beam.score + logprob, beam.slot, token as u32)));
            }
            all.sort_by(|a, b| b.0.total_cmp(&a.0)); // stable sort: equals keep the order of beams and tokens
            let ends = |token: &u32| eos.contains(token);
            let (mut next, mut finished) = (Vec::new(), Vec::new());
            for (rank, &(_, slot, token)) in all.iter().enumerate() {
                match ends(&token) {
                    false if next.len() < width as usize => next.push((slot, token)),
                    true if next.len() < width as usize && rank < width as usize => finished.push((slot, token)),
                    _ => {}
                }
            }
            search.decide(&rows, &mut |_, _| Ok(()), &mut scratch, &mut step).unwrap();
            assert_eq!(step.finished.iter().map(|ending| (ending.parent, ending.token)).collect::<Vec<_>>(), finished, "seed {seed}");
            if step.done {
                break;
            }
            assert_eq!(step.next.iter().map(|next| (next.parent, next.token)).collect::<Vec<_>>(), next, "seed {seed}");
            continued += 1;
            search.commit(&step).unwrap();
        }
    }
    assert!(continued > 300, "{continued}");
}

/// Runs searches with many parameters on random tables.
fn random_searches(look: impl Fn(&BeamSearch, &BeamStep)) {
    for seed in 0..200 {
        let pick = |index: u64, end: usize| (uniform(seed, index, Lane::Token) * end as f64) as usize;
        let groups = [1, 1, 2, 4][pick(0, 4)];
        let params = BeamParams {
            width: groups * [1, 2, 3, 8][pick(1, 4)].max(if groups == 1 { 2 } else { 1 }),
            groups,
            diversity_penalty: if groups > 1 { 0.7 } else { 0.0 },
            length_penalty: [1.0, 0.0, -1.0, 2.0][pick(2, 4)],
            early_stopping: [EarlyStopping::Yes, EarlyStopping::No, EarlyStopping::Never][pick(3, 3)],
        };
        let mut table = Table::random(seed + 1000, [3, 10, 40][pick(4, 3)]);
        for (row, values) in table.0.iter_mut().enumerate() {
            // Some tokens are excluded, in some tables nearly all.
            let excluded = [0.0, 0.3, 0.9][pick(5, 3)];
            for (token, value) in values.iter_mut().enumerate() {
                if uniform(seed + 2000, (row * 100 + token) as u64, Lane::Token) < excluded {
                    *value = NONE;
                }
            }
        }
        let eos = &[1, 2][..pick(6, 3)];
        let width = params.width as usize;
        let mut search = BeamSearch::new(&params, width, eos, 12).unwrap();
        run(&mut search, &table, usize::MAX, &look);
        let best = search.best().unwrap();
        assert!(best.len() <= width);
        assert!(best.is_sorted_by(|a, b| a.score >= b.score), "best first");
    }
}

#[test]
fn each_beam_has_its_own_slot_and_first_children_keep_theirs() {
    random_searches(|search, step| {
        let mut slots: Vec<usize> = step.next.iter().map(|next| next.slot).collect();
        slots.sort_unstable();
        assert!(slots.windows(2).all(|pair| pair[0] < pair[1]), "{slots:?}");
        assert!(slots.iter().all(|&slot| slot < search.params.width as usize));
        for (place, next) in step.next.iter().enumerate() {
            let first = !step.next[..place].iter().any(|other| other.parent == next.parent);
            assert_eq!(next.slot == next.parent, first);
        }
        for beam in search.running() {
            let has_child = step.next.iter().any(|next| next.parent == beam.slot);
            assert_ne!(has_child, step.dropped.contains(&beam.slot));
        }
    });
}

#[test]
fn scores_never_increase_along_a_beam_and_are_ranked_in_each_group() {
    random_searches(|search, step| {
        for next in &step.next {
            let parent = search.groups[next.group].running.iter().find(|beam| beam.slot == next.parent).unwrap();
            assert!(next.score <= parent.score && next.score.is_finite());
        }
        assert!(step.next.windows(2).all(|pair| pair[0].group < pair[1].group || pair[0].score >= pair[1].score));
        for group in 0..search.groups.len() {
            assert!(step.next.iter().filter(|next| next.group == group).count() <= search.group_size());
        }
    });
}

#[test]
fn selection_changes_no_state_and_does_not_depend_on_used_buffers() {
    let table = Table::random(5, 20);
    let mut search = BeamSearch::new(&params(4), 4, &[3], 8).unwrap();
    let before = format!("{search:?}");
    let rows = table.after(&[]).repeat(4);
    let (mut scratch, mut step) = (BeamScratch::default(), BeamStep::default());
    search.decide(&rows, &mut |_, _| Ok(()), &mut scratch, &mut step).unwrap();
    let mut again = BeamStep { done: true, ..step.clone() };
    search.decide(&rows, &mut |_, _| Ok(()), &mut scratch, &mut again).unwrap();
    assert_eq!(step, again);
    assert_eq!(format!("{search:?}"), before);
    search.commit(&step).unwrap();
    assert_eq!((search.generated(), search.running().count()), (1, 4));
}

/// Token 1 ends the sequence; it ranks best in the first step and after 2. The continuation of 0
/// costs little at first, and much later.
fn late_cost() -> Table {
    Table(vec![
        vec![-1.0, -0.9, -1.1, -9.0],
        vec![-9.0, -9.0, -9.0, -0.5],
        vec![NONE; 4],
        vec![-9.0, -0.3, -9.0, -9.0],
        vec![-9.0, -9.0, -9.0, -2.0],
    ])
}

fn steps_until_done(early_stopping: EarlyStopping, length_penalty: f32) -> usize {
    let mut search = BeamSearch::new(&BeamParams { early_stopping, length_penalty, ..params(2) }, 2, &[1], 30).unwrap();
    run(&mut search, &late_cost(), usize::MAX, |_, _| ());
    search.generated()
}

#[test]
fn early_stopping_yes_ends_first_and_never_ends_last() {
    let steps =
        |length_penalty| [EarlyStopping::Yes, EarlyStopping::No, EarlyStopping::Never].map(|form| steps_until_done(form, length_penalty));
    let [yes, no, never] = steps(1.0);
    assert!((yes, no) == (2, 3) && (10..30).contains(&never), "{yes} {no} {never}");
    assert_eq!(steps(0.0), [2, 2, 2], "sums only decrease, so no open beam can become better");
}

#[test]
fn an_end_token_outside_the_best_candidates_ends_no_beam() {
    let table = Table(vec![vec![-0.5, -3.0, -1.0, -2.0]; 5]);
    let mut search = BeamSearch::new(&params(2), 2, &[1], 9).unwrap();
    run(&mut search, &table, 1, |_, step| {
        assert!(step.finished.is_empty());
        assert_eq!(step.next.iter().map(|next| next.token).collect::<Vec<_>>(), [0, 2]);
    });
    let mut search = BeamSearch::new(&params(2), 2, &[2], 9).unwrap();
    run(&mut search, &table, 1, |_, step| {
        assert_eq!(step.finished.iter().map(|ending| ending.token).collect::<Vec<_>>(), [2]);
        assert_eq!(step.next.iter().map(|next| next.token).collect::<Vec<_>>(), [0, 3]);
    });
}

#[test]
fn a_small_vocabulary_gives_fewer_beams() {
    let two = Table::random(1, 2);
    let best = found(&params(8), 8, &[], 2, &two);
    assert_eq!(best.len(), 4, "two steps of two tokens give four sequences");
    let one = Table(vec![vec![NONE, NONE, -0.25]; 4]);
    let best = found(&params(8), 8, &[], 5, &one);
    assert_eq!(best.len(), 1);
    assert_eq!((best[0].tokens.as_slice(), best[0].score), (&[2; 5][..], -0.25));
}

#[test]
fn a_search_without_allowed_tokens_ends_with_its_finished_beams() {
    let nothing = Table(vec![vec![NONE; 3]; 4]);
    assert_eq!(found(&params(2), 2, &[1], 5, &nothing), []);
    let only_the_end = Table(vec![vec![-0.5, -1.0, NONE], vec![NONE; 3], vec![NONE; 3], vec![NONE; 3]]);
    let best = found(&params(2), 2, &[1], 5, &only_the_end);
    assert_eq!(best.iter().map(|best| best.tokens.as_slice()).collect::<Vec<_>>(), [&[1]]);
}

#[test]
fn diversity_penalizes_the_tokens_of_earlier_groups() {
    let table = Table(vec![vec![-1.0, -1.5, -1.8, -2.5]; 5]);
    let params = BeamParams { groups: 3, diversity_penalty: 1.0, ..params(3) };
    let mut search = BeamSearch::new(&params, 3, &[], 4).unwrap();
    run(&mut search, &table, 1, |_, step| {
        let selected: Vec<_> = step.next.iter().map(|next| (next.token, next.score, next.logprob)).collect();
        assert_eq!(selected, [(0, -1.0, -1.0), (1, -1.5, -1.5), (2, -1.8, -1.8)]);
    });
    let params = BeamParams { diversity_penalty: 0.375, ..params };
    let mut search = BeamSearch::new(&params, 3, &[], 4).unwrap();
    run(&mut search, &table, 1, |_, step| {
        let selected: Vec<_> = step.next.iter().map(|next| (next.token, next.score, next.logprob)).collect();
        assert_eq!(
            selected,
            [(0, -1.0, -1.0), (0, -1.375, -1.0), (1, -1.5, -1.5)],
            "the third group has a penalty of 0.75 for token 0 and none for token 1"
        );
    });
}

#[test]
fn a_finished_group_counts_as_selecting_the_first_end_token() {
    // Token 1 ends the sequence, best after 0. The first group finishes in the second step, the
    // second group in the third.
    let table = Table(vec![vec![-0.2, -9.0, -1.0], vec![-1.5, -0.1, -3.0], vec![NONE; 3], vec![-0.1, -9.0, -6.0]]);
    let third_step_of_the_second = |diversity_penalty| {
        let params = BeamParams { groups: 2, diversity_penalty, early_stopping: EarlyStopping::Yes, ..params(2) };
        let mut search = BeamSearch::new(&params, 2, &[1], 5).unwrap();
        let mut tokens: Vec<u32> = Vec::new();
        run(&mut search, &table, 3, |search, step| {
            assert_eq!(search.groups[0].running.is_empty(), search.generated() == 2);
            tokens = step.next.iter().map(|next| next.token).collect();
        });
        tokens
    };
    assert_eq!(third_step_of_the_second(1.0), [0u32; 0], "the group ends with token 1");
    assert_eq!(third_step_of_the_second(2.0), [0], "the penalty of token 1 is too high");
}

#[test]
fn logits_that_are_not_finite_end_the_search_with_an_error() {
    let search = BeamSearch::new(&params(2), 1, &[], 4).unwrap();
    let (mut scratch, mut step) = (BeamScratch::default(), BeamStep::default());
    for bad in [f32::NAN, f32::INFINITY] {
        let error = search.decide(&[0.0, bad, 0.0, 0.0], &mut |_, _| Ok(()), &mut scratch, &mut step).unwrap_err();
        assert_eq!(error.code(), Code::Model);
    }
}

#[test]
fn a_wrong_number_of_logit_rows_is_an_error() {
    let mut search = BeamSearch::new(&params(2), 1, &[], 2).unwrap();
    let (mut scratch, mut step) = (BeamScratch::default(), BeamStep::default());
    let rows = [-1.0, -2.0, -3.0].repeat(2);
    let mut decide = |search: &BeamSearch, rows: &[f32]| {
        let decided = search.decide(rows, &mut |_, _| Ok(()), &mut scratch, &mut step);
        decided.map(|()| step.clone()).map_err(|error| error.code())
    };
    assert_eq!(decide(&search, &[]), Err(Code::Internal));
    assert_eq!(decide(&search, &rows[1..]), Err(Code::Internal));
    for _ in 0..2 {
        let step = decide(&search, &rows).unwrap();
        search.commit(&step).unwrap();
    }
    assert!(search.is_done());
    assert_eq!(decide(&search, &rows), Err(Code::Internal));
}

/// As in transformers 4, in which HammingDiversity precedes the other processors.
#[test]
fn processors_run_after_the_diversity_penalty_and_logprobs_exclude_it() {
    let table = Table(vec![vec![-1.0, -1.5, -1.75, -9.0]; 5]);
    let params = BeamParams { groups: 2, diversity_penalty: 0.25, ..params(2) };
    let search = BeamSearch::new(&params, 2, &[], 4).unwrap();
    let (mut scratch, mut step) = (BeamScratch::default(), BeamStep::default());
    let mut dearer_first = |_: usize, row: &mut [f32]| {
        row[0] *= 1.25;
        Ok(())
    };
    search.decide(&table.after(&[]).repeat(2), &mut dearer_first, &mut scratch, &mut step).unwrap();
    let selected: Vec<_> = step.next.iter().map(|next| (next.token, next.score, next.logprob)).collect();
    assert_eq!(selected, [(0, -1.25, -1.0), (1, -1.5, -1.5)], "with a penalty after the processors, token 0 would rank first with -1.5");
}

#[test]
fn a_search_allocates_memory_as_tokens_are_added() {
    let mut search = BeamSearch::new(&params(64), 1, &[], 1_000_000).unwrap();
    assert_eq!(search.nodes.capacity(), 0);
    run(&mut search, &Table::random(3, 40), 9, |_, _| ());
    assert!((64 * 8..64 * 9 * 3).contains(&search.nodes.capacity()), "{}", search.nodes.capacity());
}

#[test]
fn searches_that_are_too_large_or_have_no_tokens_are_refused() {
    assert!(BeamSearch::new(&params(4), 1, &[], 0).unwrap_err().message().contains("max_tokens is 0"));
    assert!(BeamSearch::new(&params(4), 5, &[], 9).unwrap_err().message().contains("n is 5"));
    assert!(BeamSearch::new(&params(64), 1, &[], usize::MAX).unwrap_err().message().contains("64 beams"));
}

#[test]
fn open_beams_at_the_last_step_are_results_unless_the_group_is_complete() {
    // Token 1 ends the sequence and ranks second. In the step in which it completes the results, a
    // better beam could continue.
    let table = Table(vec![vec![-0.5, -0.75, -3.0]; 4]);
    let yes = BeamParams { early_stopping: EarlyStopping::Yes, ..params(2) };
    let tokens = |params: &BeamParams| found(params, 2, &[1], 2, &table).into_iter().map(|best| best.tokens).collect::<Vec<_>>();
    assert_eq!(tokens(&yes), [vec![0, 0], vec![0, 1]], "better than token 1 alone, which has the score -0.75");
    let groups = BeamParams { width: 4, groups: 2, diversity_penalty: 0.125, ..yes };
    assert_eq!(tokens(&groups), [vec![0, 1], vec![0, 1]], "token 1 completes each group, and open beams are dropped");
}
