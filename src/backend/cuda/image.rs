//! The kernels in the library: machine code for some architectures, and PTX that drivers compile
//! for others.

use miniz_oxide::inflate::decompress_slice_iter_to_slice;

use crate::error::{Error, Result, try_vec};
use crate::sys::bytes::as_bytes_mut;

// `MIN_DRIVER` and `IMAGES`, which build.rs writes. The list is empty if nvcc was missing.
include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
// Test builds have no machine code.
#[allow(dead_code)]
enum Kind {
    Machine,
    Ptx,
}

/// The kernels for one architecture.
// Builds without nvcc have none.
#[allow(dead_code)]
struct Image {
    kind: Kind,
    /// Compute capability of the architecture.
    major: u32,
    minor: u32,
    /// True if no other GPU can run it.
    only_this: bool,
    /// Size without compression.
    bytes: usize,
    compressed: &'static [u8],
}

/// Compute capabilities of Tegra, which machine code for other GPUs does not support.
const TEGRA: [(u32, u32); 2] = [(8, 7), (10, 1)];

impl Image {
    /// Returns whether a GPU of this compute capability can run it.
    fn runs_on(&self, capability: (u32, u32)) -> bool {
        let own = (self.major, self.minor);
        match self.kind {
            Kind::Machine if self.only_this => capability == own,
            Kind::Machine => capability.0 == own.0 && capability.1 >= own.1 && !TEGRA.contains(&capability),
            Kind::Ptx => capability >= own,
        }
    }
}

/// Returns whether the library was built without kernels.
pub fn is_missing() -> bool {
    IMAGES.is_empty()
}

/// Kernels that the driver can load. The driver reads 64-bit numbers of machine code in place, and
/// PTX up to a zero byte.
pub struct Kernels(Vec<u64>);

impl Kernels {
    /// Returns the kernels for a GPU of this compute capability.
    pub fn for_capability(capability: (u32, u32)) -> Result<Kernels> {
        let image = select(IMAGES, capability).ok_or_else(|| {
            let (major, minor) = capability;
            Error::unsupported(format!("this library has no kernels for compute capability {major}.{minor}; set device to \"cpu\""))
        })?;
        let mut numbers = try_vec(image.bytes / size_of::<u64>() + 1, 0u64)?;
        let out = &mut as_bytes_mut(&mut numbers)[..image.bytes];
        match decompress_slice_iter_to_slice(out, std::iter::once(image.compressed), false, true) {
            Ok(bytes) if bytes == image.bytes => Ok(Kernels(numbers)),
            result => Err(Error::internal(format!("the kernels of this library are damaged ({result:?}, {} bytes)", image.bytes))),
        }
    }

    /// Returns the address of the image.
    pub fn start(&self) -> *const std::ffi::c_void {
        self.0.as_ptr().cast()
    }
}

/// Returns the image for a GPU: machine code for the latest architecture that it can run, or else
/// PTX.
fn select(images: &[Image], capability: (u32, u32)) -> Option<&Image> {
    let usable = images.iter().filter(|image| image.runs_on(capability));
    usable.max_by_key(|image| (image.kind == Kind::Machine, image.only_this, image.major, image.minor))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Images as in a release.
    fn images() -> Vec<Image> {
        let image = |kind, major, minor, only_this| Image { kind, major, minor, only_this, bytes: 0, compressed: &[] };
        let machine = [(8, 0, false), (8, 6, false), (8, 9, false), (9, 0, true), (10, 0, false), (12, 0, false)];
        let machine = machine.map(|(major, minor, only_this)| image(Kind::Machine, major, minor, only_this));
        std::iter::once(image(Kind::Ptx, 8, 0, false)).chain(machine).collect()
    }

    #[test]
    fn a_gpu_gets_the_latest_machine_code_that_it_can_run() {
        let images = images();
        let selected = |capability| select(&images, capability).map(|image| (image.kind, image.major, image.minor));
        for own in [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)] {
            assert_eq!(selected(own), Some((Kind::Machine, own.0, own.1)));
        }
        assert_eq!(selected((10, 3)), Some((Kind::Machine, 10, 0)));
        assert_eq!(selected((12, 1)), Some((Kind::Machine, 12, 0)));
    }

    #[test]
    fn other_gpus_get_ptx_or_nothing() {
        let images = images();
        for capability in [(8, 7), (9, 1), (10, 1), (11, 0), (13, 0)] {
            assert!(select(&images, capability).is_some_and(|image| image.kind == Kind::Ptx), "{capability:?}");
        }
        assert!(select(&images, (7, 5)).is_none());
    }

    #[test]
    fn the_kernels_of_this_build_can_be_decompressed() {
        for image in IMAGES {
            let kernels = Kernels::for_capability((image.major, image.minor)).unwrap();
            assert_eq!((kernels.start().addr() % 8, kernels.0.last().unwrap().to_ne_bytes()[7]), (0, 0));
        }
        assert!(is_missing() || Kernels::for_capability((7, 5)).is_err());
    }
}
