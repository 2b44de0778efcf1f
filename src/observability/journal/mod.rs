//! The files of journals: the records, how they are written and read, and the digests of outputs.

pub mod digests;
pub mod reader;
pub mod records;
pub mod writer;
