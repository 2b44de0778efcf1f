//! What the stepping thread shares with the threads of the host.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::admission_snapshot::AdmissionSnapshot;
use super::budget_checks::BudgetChecks;
use super::clock::Clock;
use super::kv_events::EventQueue;
use super::sequence_table::SequenceTable;
use super::snapshot::SnapshotExchange;
use super::transfers::Completions;
use super::wait_queue::QueueLimits;
use crate::observability::metrics::Histograms;
use crate::observability::stats::Stats;
use crate::text::Text;
use crate::types::options::EngineOptions;

/// The state that both read and change.
#[derive(Clone)]
pub struct Shared {
    pub text: Option<Arc<Text>>,
    pub table: Arc<SequenceTable>,
    /// Statistics after the last step.
    pub published: Arc<Mutex<Published>>,
    /// What the admission of requests is forecast from.
    admission: Arc<Mutex<AdmissionSnapshot>>,
    pub clock: Arc<dyn Clock>,
    /// True if the budget requires the engine to check its lease.
    pub wants_check: Arc<AtomicBool>,
    pub budget_checks: Arc<BudgetChecks>,
    /// Transfers that other threads have completed.
    pub completions: Completions,
    /// Events of the prefix cache. `None` if they are not recorded.
    pub events: Option<Arc<EventQueue>>,
    /// Snapshots that other threads wait for.
    pub snapshots: Arc<SnapshotExchange>,
}

impl Shared {
    pub fn new(
        options: &EngineOptions,
        max_model_len: usize,
        text: Option<Text>,
        events: Option<Arc<EventQueue>>,
        clock: Arc<dyn Clock>,
    ) -> Shared {
        let table = Arc::new(SequenceTable::new(QueueLimits::from_options(options), max_model_len, options.max_seqs));
        Shared {
            text: text.map(Arc::new),
            completions: Completions::new(table.wakeup.clone()),
            table,
            published: Arc::default(),
            admission: Arc::default(),
            wants_check: Arc::default(),
            budget_checks: Arc::default(),
            events,
            snapshots: Arc::default(),
            clock,
        }
    }

    pub fn admission(&self) -> MutexGuard<'_, AdmissionSnapshot> {
        self.admission.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The statistics that other threads can read during a step.
#[derive(Debug, Clone, Copy, Default)]
pub struct Published {
    pub stats: Stats,
    pub histograms: Histograms,
}
