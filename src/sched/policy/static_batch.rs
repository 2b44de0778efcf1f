use super::{Batching, Portion, Running};

/// Static batching: no group is admitted until the running batch has finished. Systems before Orca
/// worked this way, and the PagedAttention paper compares with it.
pub struct Static;

impl Batching for Static {
    fn portion(&self, running: Running) -> Portion {
        Portion { newcomers: running.is_empty(), ..Portion::WHATEVER }
    }
}
