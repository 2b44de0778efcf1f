//! Finds places where a text can be cut so that the tokens of the pieces are the tokens of the
//! whole.
//!
//! The `tokenizers` crate takes some hundred bytes for each byte of a text, so a text is encoded in
//! pieces. `a|b` means a cut between the characters a and b. A cut must meet all of these
//! conditions:
//!
//! - The normalizer does not connect both sides: it is empty, replaces each space, or is NFC. With
//!   NFC, b is a boundary, and a and b are characters that NFC does not change.
//! - Either the pre-tokenizer always ends a word at `a|b` and finds the same words on each side
//!   alone (see [`words`]), or no token of a BPE model joins a and b (see [`symbols`]).
//! - No added token contains a and b side by side, and no added token depends on the text beyond
//!   the cut (see [`Cuts::protect`]).
//!
//! Pieces get no special tokens. The caller adds those of the post-processor once.

use std::collections::HashSet;

use serde_json::Value as Json;
use tokenizers::AddedToken;

use super::check::{self, PipelinePart};

/// Length of a piece in bytes after the maximum growth by the normalizer and the pre-tokenizer.
const PIECE_BYTES: u64 = 64 << 10;
/// Maximum length of a stretch without a possible cut, counted in the same way.
const STRETCH_BYTES: u64 = 2 << 20;

/// Splits by expressions. Their matches have these properties. No match contains a space after
/// another character that is not white space, or a line break or `PUNCTUATION` after a letter. All
/// of these characters are matched. No expression looks behind. Only white space looks ahead
/// (`\s+(?!\S)`), by one character at most.
const WORDS: [&str; 7] = [
    // GPT-2
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    // Llama 3, GPT-4
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // Qwen 2 and 3
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // GPT-4o, gpt-oss, Llama 4
    concat!(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    // Mistral
    concat!(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|",
        r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    // DeepSeek V3
    concat!(
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"##,
        r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    // The example model
    r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+",
];

/// Splits by runs of digits or letters. A run ends at each of the cuts above.
const RUNS: [&str; 5] = [r"\p{N}{1,3}", r"\p{N}", "[0-9]", "[0-9][0-9][0-9]", "[一-龥぀-ゟ゠-ヿ]+"];

/// Characters that are neither letters, digits, white space, apostrophes nor underscores for any of
/// the expressions above.
const PUNCTUATION: &str = "!\"#$%&()*+,-./:;<=>?@[\\]^`{|}~。，、！？；：";

/// Rule for the places where a text can be cut.
#[derive(Debug)]
pub(super) struct Cuts {
    rule: Rule,
    /// If true, the normalizer writes a prefix at the start of a piece. The prefix replaces the
    /// space at the cut, which is left out.
    drop_space: bool,
    nfc: bool,
    /// Length in bytes after which the next cut is searched.
    pub piece: usize,
    /// Maximum length in bytes of a stretch without a possible cut.
    pub max_stretch: usize,
    joined: HashSet<(char, char)>,
    never_before: HashSet<char>,
    never_after: HashSet<char>,
}

#[derive(Debug)]
enum Rule {
    /// No cut is known to be safe.
    Whole,
    /// The pre-tokenizer ends a word at `a| ` if a is not white space. If `letters` is set, it also
    /// ends a word at `a|b` if a is a letter and b is a line break or `PUNCTUATION`.
    Words {
        letters: bool,
    },
    Symbols(Symbols),
}

/// A BPE model whose input is the whole text as one word. Symbols begin as characters, so a merge
/// across `a|b` creates a token that contains a and b side by side. If no token does, the merges on
/// both sides are independent.
#[derive(Debug)]
struct Symbols {
    /// The character of a space in the normalized text.
    space: char,
    /// If true, cuts before line breaks are possible, because no prefix is written there.
    newline: bool,
    /// Characters that are tokens. Other characters become bytes or the unknown token, which can
    /// join.
    single: HashSet<char>,
    /// Characters that precede `space`, or a line break, in a token.
    before_space: HashSet<char>,
    before_newline: HashSet<char>,
}

/// Properties of the normalizer on which cuts depend.
struct Normalized {
    /// The character of a space.
    space: char,
    prefix: bool,
    nfc: bool,
}

impl Cuts {
    /// Finds the rule of a file. `expansion` is the maximum growth factor of the normalizer and the
    /// pre-tokenizer.
    pub fn new(file: &Json, expansion: u64) -> Result<Cuts, String> {
        let normalizers = check::parts(&file["normalizer"], "normalizer", "normalizers")?;
        let pre_tokenizers = check::parts(&file["pre_tokenizer"], "pre_tokenizer", "pretokenizers")?;
        let normalized = normalized(&normalizers);
        let rule = normalized.as_ref().and_then(|normalized| {
            words(&pre_tokenizers, normalized).or_else(|| symbols(&file["model"], &pre_tokenizers, normalized).map(Rule::Symbols))
        });
        Ok(Cuts {
            rule: rule.unwrap_or(Rule::Whole),
            drop_space: normalized.as_ref().is_some_and(|normalized| normalized.prefix),
            nfc: normalized.is_some_and(|normalized| normalized.nfc),
            piece: (PIECE_BYTES / expansion).clamp(1 << 10, 32 << 10) as usize,
            max_stretch: (STRETCH_BYTES / expansion) as usize,
            joined: HashSet::new(),
            never_before: HashSet::new(),
            never_after: HashSet::new(),
        })
    }

    /// Prevents cuts within an added token, in its original and its normalized form.
    ///
    /// If no occurrence of a token crosses a cut, the leftmost longest matches on both sides are
    /// those of the whole text. Some tokens depend on further characters. With `rstrip`, a token
    /// consumes the white space after it, so no cut follows its last character. With `single_word`,
    /// a token checks the character before it, so no cut precedes its first character. `lstrip`
    /// needs no rule: the character before a cut is not white space, and the character after a cut
    /// is not part of a word.
    ///
    /// A token that is matched before normalization ends the text before it, and the text after it
    /// gets its own prefix. If a prefix replaces the space at a cut, such a token must not touch
    /// the cut.
    pub fn protect(&mut self, token: &AddedToken, normalized: &str) {
        let spaced = normalized.replace('\u{2581}', " ");
        for content in [&token.content, normalized, &spaced] {
            self.joined.extend(content.chars().zip(content.chars().skip(1)));
            if token.rstrip {
                self.never_after.extend(content.chars().next_back());
            }
            if token.single_word {
                self.never_before.extend(content.chars().next());
            }
        }
        if self.drop_space && !token.normalized {
            self.never_before.extend(token.content.chars().next());
            self.never_after.extend(token.content.chars().next_back());
        }
    }

    /// Returns the end of the piece that begins at `start`, and the start of the next piece, which
    /// after the last piece is the end of the text. The piece has at least `piece` bytes, unless
    /// the text ends.
    ///
    /// # Errors
    /// The length of a stretch without a possible cut, if it is too long.
    pub fn next(&self, text: &str, start: usize, piece: usize) -> Result<(usize, usize), usize> {
        let mut from = text.len().min(start + piece.max(1));
        while !text.is_char_boundary(from) {
            from += 1;
        }
        let mut before = text[start..from].chars().next_back();
        let mut rest = text[from..].char_indices().peekable();
        while let Some((at, b)) = rest.next() {
            let after = rest.peek().map(|&(_, after)| after);
            if before.is_some_and(|a| self.allows(a, b, after)) {
                let end = from + at;
                return Ok((end, end + usize::from(self.drop_space)));
            }
            if from + at - start > self.max_stretch {
                break;
            }
            before = Some(b);
        }
        let length = text.len() - start;
        if length > self.max_stretch { Err(length) } else { Ok((text.len(), text.len())) }
    }

    fn allows(&self, a: char, b: char, after: Option<char>) -> bool {
        if a.is_whitespace() || a == '\u{2581}' || !self.proven(a, b) {
            return false;
        }
        // NFC can compose a mark before the cut, or a character with the mark after it.
        if self.nfc && (!(a.is_ascii() || is_letter(a) || PUNCTUATION.contains(a)) || "<=>".contains(b)) {
            return false;
        }
        // After a dropped space, the piece begins with the next character.
        if self.drop_space && !after.is_some_and(|after| !after.is_whitespace() && !self.never_before.contains(&after)) {
            return false;
        }
        !self.joined.contains(&(a, b)) && !self.never_after.contains(&a) && !self.never_before.contains(&b)
    }

    fn proven(&self, a: char, b: char) -> bool {
        match &self.rule {
            Rule::Whole => false,
            Rule::Words { letters } => b == ' ' || *letters && is_letter(a) && (b == '\n' || PUNCTUATION.contains(b)),
            Rule::Symbols(symbols) => symbols.are_apart(a, b),
        }
    }
}

impl Symbols {
    fn are_apart(&self, a: char, b: char) -> bool {
        let joining = match b {
            ' ' => &self.before_space,
            '\n' if self.newline => &self.before_newline,
            _ => return false,
        };
        a != self.space && self.single.contains(&a) && !joining.contains(&a)
    }
}

/// Returns true for letters in every version of Unicode, which `\p{L}` above matches.
fn is_letter(c: char) -> bool {
    matches!(c, 'a'..='z' | 'A'..='Z' | 'А'..='я' | 'ぁ'..='ゖ' | 'ァ'..='ヺ' | '一'..='龥' | '가'..='힣')
}

fn normalized(parts: &[PipelinePart]) -> Option<Normalized> {
    let mut found = Normalized { space: ' ', prefix: false, nfc: false };
    for (_, kind, part) in parts {
        match *kind {
            "NFC" => found.nfc = true,
            "Replace" if part["pattern"]["String"] == " " && part["content"] == "\u{2581}" => found.space = '\u{2581}',
            "Prepend" if part["prepend"] == "\u{2581}" && !found.prefix => found.prefix = true,
            _ => return None,
        }
    }
    // A prefix can replace a space only if both become the same character.
    (!found.prefix || found.space == '\u{2581}').then_some(found)
}

/// Returns the rule if the pre-tokenizer ends words at spaces: splits by runs, a split into words,
/// then parts that process each word alone.
fn words(parts: &[PipelinePart], normalized: &Normalized) -> Option<Rule> {
    if normalized.prefix {
        return None;
    }
    for (_, kind, part) in parts {
        match *kind {
            "Digits" => {}
            "Punctuation" if matches!(part["behavior"].as_str(), None | Some("Isolated" | "Contiguous" | "Removed")) => {}
            "Split" if is_split(part, &RUNS) => {}
            "Metaspace" if part["split"] != false => {
                let fits = normalized.space == ' ' || part["replacement"] == "\u{2581}";
                return (fits && parts.len() == 1).then_some(Rule::Words { letters: false });
            }
            _ if normalized.space != ' ' => return None,
            "Split" if is_split(part, &WORDS) => return works_on_words(parts).then_some(Rule::Words { letters: true }),
            // Otherwise a prefix is written before a piece that does not begin with a space.
            "ByteLevel" if part["use_regex"] != false => {
                return works_on_words(parts).then_some(Rule::Words { letters: part["add_prefix_space"] == false });
            }
            "BertPreTokenizer" | "Whitespace" | "WhitespaceSplit" => {
                return works_on_words(parts).then_some(Rule::Words { letters: false });
            }
            _ => return None,
        }
    }
    None
}

/// Returns true if each part processes words alone. Metaspace can depend on the position of a word
/// in the text.
fn works_on_words(parts: &[PipelinePart]) -> bool {
    parts.iter().all(|(_, kind, _)| *kind != "Metaspace")
}

/// Returns true if this part splits by an expression with linear search time.
pub(super) fn is_known_split(part: &Json) -> bool {
    is_split(part, &WORDS) || is_split(part, &RUNS)
}

fn is_split(part: &Json, expressions: &[&str]) -> bool {
    let Some(regex) = part["pattern"]["Regex"].as_str() else { return false };
    let regex = regex.replace('\r', r"\r").replace('\n', r"\n");
    part["behavior"] == "Isolated" && part["invert"] == false && expressions.contains(&regex.as_str())
}

/// Returns the rule if the input of a BPE model is the whole text as one word.
fn symbols(model: &Json, parts: &[PipelinePart], normalized: &Normalized) -> Option<Symbols> {
    let (space, newline) = match parts {
        [] => (normalized.space, !normalized.prefix),
        // After normalization, no space is left to split at.
        [(_, "Split", part)] if part["pattern"]["String"] == " " && normalized.space != ' ' => (normalized.space, !normalized.prefix),
        // Otherwise a prefix is written before a piece that does not begin with a space.
        [(_, "Metaspace", part)] if part["split"] == false && part["replacement"] == "\u{2581}" && !normalized.prefix => {
            ('\u{2581}', part["prepend_scheme"] == "never")
        }
        _ => return None,
    };
    let affix = |name: &str| !model[name].as_str().unwrap_or_default().is_empty();
    let plain = !affix("continuing_subword_prefix") && !affix("end_of_word_suffix") && model["ignore_merges"] != true;
    // NFC can compose the character before a cut.
    if !plain || normalized.nfc || model.get("merges").is_none() {
        return None;
    }
    let mut found = Symbols { space, newline, single: HashSet::new(), before_space: HashSet::new(), before_newline: HashSet::new() };
    for token in model["vocab"].as_object()?.keys() {
        let mut chars = token.chars();
        if let (Some(c), None) = (chars.next(), chars.next()) {
            found.single.insert(c);
        }
        for (a, b) in token.chars().zip(token.chars().skip(1)) {
            if b == found.space {
                found.before_space.insert(a);
            } else if b == '\n' {
                found.before_newline.insert(a);
            }
        }
    }
    found.newline &= found.single.contains(&'\n');
    found.single.contains(&found.space).then_some(found)
}

#[cfg(test)]
mod tests;
