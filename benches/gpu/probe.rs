//! The instruction on which equal bits rest: `mma.sync` returns its third operand with the same
//! bits where the product is zero. Tiles are padded with zeros in the number of tokens, so
//! attention would otherwise depend on the padding.

use std::ffi::{CString, c_void};
use std::ptr::null_mut;

use cudarc::driver::{result, sys};
use half::{bf16, f16};

use crate::Result;
use crate::line::verdict;
use crate::random::Random;

const PART: &str = "probe";
const WARPS: usize = 4096;
const LANES: usize = 32;
/// Registers of a lane: of a, of b, and of c and d.
const REGISTERS: (usize, usize, usize) = (4, 2, 4);

/// Which of the numbers of a and b are zero.
#[derive(Clone, Copy)]
enum Zeros {
    AllOfA,
    AllOfB,
    /// Rows 0 to 7. Only the numbers of c in these rows are compared.
    HalfOfA,
}

pub fn check() -> Result<()> {
    let device = Probe::open()?;
    for (dtype, largest) in [("bf16", bf16::MAX.to_bits()), ("f16", f16::MAX.to_bits())] {
        for (zeros, name) in [(Zeros::AllOfA, "a is 0"), (Zeros::AllOfB, "b is 0"), (Zeros::HalfOfA, "half of a is 0")] {
            verdict(PART, &format!("mma in {dtype} returns c if {name}"), device.returns_c(dtype, largest, zeros));
        }
    }
    Ok(())
}

/// Memory and kernels on the primary context of device 0.
struct Probe {
    module: sys::CUmodule,
    a: sys::CUdeviceptr,
    b: sys::CUdeviceptr,
    c: sys::CUdeviceptr,
}

impl Probe {
    fn open() -> Result<Probe> {
        let code = CString::new([HEADER.to_string(), kernel("bf16"), kernel("f16")].concat())?;
        let bytes = |registers| size_of::<u32>() * WARPS * LANES * registers;
        result::init()?;
        // SAFETY: the context is current for the rest of the program, which frees nothing.
        unsafe {
            result::ctx::set_current(result::primary_ctx::retain(result::device::get(0)?)?)?;
            Ok(Probe {
                module: result::module::load_data(code.as_ptr().cast())?,
                a: result::malloc_sync(bytes(REGISTERS.0))?,
                b: result::malloc_sync(bytes(REGISTERS.1))?,
                c: result::malloc_sync(bytes(REGISTERS.2))?,
            })
        }
    }

    fn returns_c(&self, dtype: &str, largest: u16, zeros: Zeros) -> Result<()> {
        let mut random = Random(1);
        let mut a: Vec<u32> = (0..WARPS * LANES * REGISTERS.0).map(|_| pair(&mut random, largest)).collect();
        let mut b: Vec<u32> = (0..WARPS * LANES * REGISTERS.1).map(|_| pair(&mut random, largest)).collect();
        let c: Vec<u32> = (0..WARPS * LANES * REGISTERS.2).map(|_| finite(&mut random)).collect();
        match zeros {
            Zeros::AllOfA => a.fill(0),
            Zeros::AllOfB => b.fill(0),
            Zeros::HalfOfA => a.iter_mut().step_by(2).for_each(|register| *register = 0),
        }
        let d = self.run(dtype, &a, &b, &c)?;
        // Registers 0 and 1 of a lane belong to rows 0 to 7.
        let compared = (0..c.len()).filter(|i| !matches!(zeros, Zeros::HalfOfA) || i % REGISTERS.2 < 2);
        let differing: Vec<usize> = compared.filter(|&i| c[i] != d[i] && !(c[i] << 1 == 0 && d[i] << 1 == 0)).collect();
        let example = |&i: &usize| format!("{} of {} numbers differ, {:#010x} became {:#010x}", differing.len(), c.len(), c[i], d[i]);
        differing.first().map_or(Ok(()), |first| Err(example(first).into()))
    }

    fn run(&self, dtype: &str, a: &[u32], b: &[u32], c: &[u32]) -> Result<Vec<u32>> {
        let mut d = vec![0; c.len()];
        // SAFETY: the buffers have the sizes of the slices, and the kernel reads and writes a number
        // of each for every register of every lane. Copies wait for the kernel.
        unsafe {
            let function = result::module::get_function(self.module, CString::new(format!("probe_{dtype}"))?)?;
            [(self.a, a), (self.b, b), (self.c, c)].into_iter().try_for_each(|(to, from)| result::memcpy_htod_sync(to, from))?;
            let pointers = [self.a, self.b, self.c];
            let mut parameters = [0, 1, 2].map(|i| (&raw const pointers[i]).cast_mut().cast::<c_void>());
            result::launch_kernel(function, (WARPS as u32, 1, 1), (LANES as u32, 1, 1), 0, null_mut(), &mut parameters)?;
            result::memcpy_dtoh_sync(&mut d, self.c)?;
        }
        Ok(d)
    }
}

/// Two random finite numbers of 16 bits.
fn pair(random: &mut Random, largest: u16) -> u32 {
    let mut number = || {
        let bits = random.next() as u32;
        ((bits & 0x7fff) % (u32::from(largest) + 1)) | (bits & 0x8000)
    };
    number() | number() << 16
}

/// A random finite f32 of any magnitude.
fn finite(random: &mut Random) -> u32 {
    let bits = random.next() as u32;
    if f32::from_bits(bits).is_finite() { bits } else { bits & 0x807f_ffff }
}

const HEADER: &str = ".version 7.0\n.target sm_80\n.address_size 64\n";

/// PTX of c = a * b + c for a tile per warp. The registers of a lane are consecutive in memory.
fn kernel(dtype: &str) -> String {
    format!(
        "
.visible .entry probe_{dtype}(.param .u64 a, .param .u64 b, .param .u64 c) {{
  .reg .b32 %lane, %block, %index;
  .reg .b64 %a, %b, %c;
  .reg .b32 %x<4>;
  .reg .b32 %y<2>;
  .reg .f32 %z<4>;
  mov.u32 %lane, %tid.x;
  mov.u32 %block, %ctaid.x;
  mad.lo.u32 %index, %block, 32, %lane;
  ld.param.u64 %a, [a];
  ld.param.u64 %b, [b];
  ld.param.u64 %c, [c];
  mad.wide.u32 %a, %index, 16, %a;
  mad.wide.u32 %b, %index, 8, %b;
  mad.wide.u32 %c, %index, 16, %c;
  ld.global.v4.b32 {{%x0, %x1, %x2, %x3}}, [%a];
  ld.global.v2.b32 {{%y0, %y1}}, [%b];
  ld.global.v4.f32 {{%z0, %z1, %z2, %z3}}, [%c];
  mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32
    {{%z0, %z1, %z2, %z3}}, {{%x0, %x1, %x2, %x3}}, {{%y0, %y1}}, {{%z0, %z1, %z2, %z3}};
  st.global.v4.f32 [%c], {{%z0, %z1, %z2, %z3}};
  ret;
}}
"
    )
}
