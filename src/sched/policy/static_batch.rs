use super::{Batching, Portion, Running};

/// Batches of requests: nobody joins one that runs. What systems did before Orca, and what the PagedAttention paper compares with.
pub struct Static;

impl Batching for Static {
    fn portion(&self, running: Running) -> Portion {
        Portion { newcomers: running.is_empty(), ..Portion::WHATEVER }
    }
}
