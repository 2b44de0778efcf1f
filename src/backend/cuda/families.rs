//! Families of kernels, which are loaded by their names.

use super::function::Function;
use crate::error::{Error, Result};

/// A function that returns a kernel by its name. None: the code for this device has no such kernel.
pub type Find<'a> = &'a dyn Fn(&str) -> Result<Option<Function>>;

pub fn find_required(find: Find, name: &str) -> Result<Function> {
    find(name)?.ok_or_else(|| Error::internal(format!("the kernel {name} is missing")))
}

/// Defines the kernels of one family, with fields of their names. It uses `Find`, `find_required` and
/// `Result` of its place.
macro_rules! family {
    ($(#[$doc:meta])* $family:ident { $($name:ident),+ $(,)? }) => {
        $(#[$doc])*
        pub struct $family {
            $(pub $name: Function,)+
        }

        impl $family {
            pub fn load(find: Find) -> Result<$family> {
                Ok($family { $($name: find_required(find, stringify!($name))?,)+ })
            }
        }
    };
}
pub(super) use family;
