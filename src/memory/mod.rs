//! Memory: the plan of an engine, and the budget that several engines share.

pub mod budget;
#[doc(hidden)]
pub mod plan;
