//! Removes anchors. Their conditions on the surrounding text are stored next to the language.

use super::language::Language;
use super::{Class, Node};

/// The condition of a part of a pattern on the position where it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Demand {
    Anywhere,
    /// At the end of the text.
    Last,
    /// At the end, or before a line feed that is the last character.
    BeforeNewline,
}

/// The texts of a part, with conditions on their start and end.
#[derive(Debug, Clone)]
struct Case {
    /// True if the part matches at the start of the text only.
    start: bool,
    end: Demand,
    texts: Language,
}

/// At most one case for each pair of conditions.
type Cases = Vec<Case>;

/// Returns the texts in which the pattern matches somewhere.
pub fn searched(node: &Node) -> Language {
    let newline = Language::repeat(&Language::class(Class::char('\n' as u32)), 0, Some(1));
    let whole = |case: Case| {
        let mut parts = Vec::with_capacity(3);
        parts.extend((!case.start).then(Language::anything));
        parts.push(case.texts);
        match case.end {
            Demand::Anywhere => parts.push(Language::anything()),
            Demand::Last => {}
            Demand::BeforeNewline => parts.push(newline.clone()),
        }
        Language::concat(parts)
    };
    Language::or(cases(node).into_iter().map(whole).collect())
}

/// Returns the texts that the pattern matches from start to end.
pub fn matched_whole(node: &Node) -> Language {
    Language::or(cases(node).into_iter().map(|case| case.texts).collect())
}

fn cases(node: &Node) -> Cases {
    let anchor = |start, end| vec![Case { start, end, texts: Language::empty_text() }];
    match node {
        Node::Class(class) => vec![anywhere(Language::class(class.clone()))],
        Node::Start => anchor(true, Demand::Anywhere),
        Node::End => anchor(false, Demand::Last),
        Node::EndOrNewline => anchor(false, Demand::BeforeNewline),
        Node::Or(nodes) => merged(nodes.iter().flat_map(cases).collect()),
        Node::Concat(nodes) => concat(nodes),
        Node::Repeat(node, min, max) => repeat(cases(node), *min, *max),
    }
}

fn anywhere(texts: Language) -> Case {
    Case { start: false, end: Demand::Anywhere, texts }
}

/// Merges cases with the same conditions.
fn merged(cases: Cases) -> Cases {
    let mut groups: Vec<(bool, Demand, Vec<Language>)> = Vec::new();
    for case in cases {
        match groups.iter_mut().find(|group| (group.0, group.1) == (case.start, case.end)) {
            Some(group) => group.2.push(case.texts),
            None => groups.push((case.start, case.end, vec![case.texts])),
        }
    }
    let join = |mut texts: Vec<Language>| if texts.len() == 1 { texts.swap_remove(0) } else { Language::or(texts) };
    groups.into_iter().map(|(start, end, texts)| Case { start, end, texts: join(texts) }).collect()
}

fn concat(nodes: &[Node]) -> Cases {
    let mut all = vec![anywhere(Language::empty_text())];
    // Parts without anchors stay one list, so that a long pattern does not become a deep one.
    let mut plain = Vec::new();
    for node in nodes {
        let mut next = cases(node);
        if let [case] = &next[..]
            && !case.start
            && case.end == Demand::Anywhere
        {
            plain.push(case.texts.clone());
            continue;
        }
        if !plain.is_empty() {
            next = follow(&[anywhere(Language::concat(std::mem::take(&mut plain)))], &next);
        }
        all = follow(&all, &next);
    }
    if plain.is_empty() { all } else { follow(&all, &[anywhere(Language::concat(plain))]) }
}

/// Returns the cases of two consecutive parts.
fn follow(lefts: &[Case], rights: &[Case]) -> Cases {
    let pairs = lefts.iter().flat_map(|left| rights.iter().map(move |right| (left, right)));
    merged(pairs.flat_map(|(left, right)| follow_one(left, right)).collect())
}

fn follow_one(left: &Case, right: &Case) -> Cases {
    let empty = Language::empty_text;
    // Only the empty text can precede the start of the text.
    let before = if !right.start {
        left.texts.clone()
    } else if left.texts.is_nullable() {
        empty()
    } else {
        return Vec::new();
    };
    let start = left.start || right.start;
    let case = |texts: Language, end| Case { start, end, texts: pair(&before, texts) };
    let mut all = Vec::new();
    match left.end {
        Demand::Anywhere => all.push(case(right.texts.clone(), right.end)),
        Demand::Last => all.extend(right.texts.is_nullable().then(|| case(empty(), Demand::Last))),
        Demand::BeforeNewline => {
            let end = if right.end == Demand::Last { Demand::Last } else { Demand::BeforeNewline };
            all.extend(right.texts.is_nullable().then(|| case(empty(), end)));
            let newline = Language::class(Class::char('\n' as u32));
            all.extend(right.texts.has_newline().then(|| case(newline, Demand::Last)));
        }
    }
    all
}

fn pair(left: &Language, right: Language) -> Language {
    Language::concat(vec![left.clone(), right])
}

/// Returns the cases of a repetition. Only empty repetitions can precede one that requires the
/// start. Only empty repetitions, or a last line feed, can follow one that requires the end. At
/// most one repetition of each kind is therefore relevant, with plain repetitions between them.
fn repeat(inner: Cases, min: u32, max: Option<u32>) -> Cases {
    let is_plain = |case: &Case| !case.start && case.end == Demand::Anywhere;
    let plain = inner.iter().find(|case| is_plain(case)).map_or_else(Language::nothing, |case| case.texts.clone());
    if inner.iter().all(is_plain) || max == Some(0) {
        return vec![anywhere(Language::repeat(&plain, min, max))];
    }
    // Empty repetitions at a position where an anchor matches count towards the minimum.
    let fills = inner.iter().any(|case| !is_plain(case) && case.texts.is_nullable());
    let others = |anchored: u32| {
        let max = match max {
            Some(max) => Some(max.checked_sub(anchored)?),
            None => None,
        };
        Some(anywhere(Language::repeat(&plain, if fills { 0 } else { min.saturating_sub(anchored) }, max)))
    };
    let of = |start: bool, anchored: bool| -> Cases {
        inner.iter().filter(|case| case.start == start && (case.end != Demand::Anywhere) == anchored).cloned().collect()
    };
    let (starts, ends, boths) = (of(true, false), of(false, true), of(true, true));
    let mut all: Cases = vec![anywhere(Language::repeat(&plain, min, max))];
    all.extend(others(1).map_or(Vec::new(), |others| follow(&starts, &[others])));
    // The cases without and with a repetition that is the last line feed.
    let newline = Language::class(Class::char('\n' as u32));
    for (count, last) in [(0, Language::empty_text()), (1, newline)] {
        if count == 1 && !plain.has_newline() {
            break;
        }
        let last = [anywhere(last)];
        if let Some(others) = others(1 + count) {
            all.extend(follow(&follow(&[others], &ends), &last));
            if min <= 1 + count || fills || plain.is_nullable() {
                all.extend(follow(&boths, &last));
            }
        }
        if let Some(others) = others(2 + count) {
            all.extend(follow(&follow(&follow(&starts, &[others]), &ends), &last));
        }
    }
    merged(all)
}
