//! Tests of the C header. `tests/scripts` and the programs in other languages test the calls.

mod header;
