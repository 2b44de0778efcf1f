use super::{Batching, Portion, Running};

/// Prompt chunks and decodes together, in the order of the groups.
pub struct Mixed;

impl Batching for Mixed {
    fn portion(&self, _: Running) -> Portion {
        Portion::WHATEVER
    }
}
