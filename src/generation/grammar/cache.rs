//! Cache of the last compiled grammars, because many requests share one grammar.

use std::sync::Arc;

use super::Compiled;
use crate::types::options::Grammar;

/// Maximum number of grammars. A grammar of a few kilobytes takes about a megabyte when compiled.
const MAX_GRAMMARS: usize = 16;

/// A least-recently-used cache. The most recently used entry is last.
#[derive(Default)]
pub struct Cache {
    entries: Vec<(Grammar, Arc<Compiled>)>,
}

impl Cache {
    pub fn get(&mut self, grammar: &Grammar) -> Option<Arc<Compiled>> {
        let found = self.entries.iter().position(|(known, _)| known == grammar)?;
        self.entries[found..].rotate_left(1);
        self.entries.last().map(|(_, compiled)| compiled.clone())
    }

    pub fn insert(&mut self, grammar: Grammar, compiled: Arc<Compiled>) {
        self.entries.retain(|(known, _)| *known != grammar);
        if self.entries.len() == MAX_GRAMMARS {
            self.entries.remove(0);
        }
        self.entries.push((grammar, compiled));
    }
}
