//! The instructions on which equal bits rest: `mma.sync` and `wgmma` return the matrix to which they
//! add with the same bits where the product is zero. Tiles are padded with zeros in the number of
//! tokens, and mask tokens by zeros, so attention would otherwise depend on the tile.

use std::ffi::{CString, c_void};
use std::ptr::null_mut;

use cudarc::driver::{result, sys};
use half::{bf16, f16};

use crate::Result;
use crate::line::{skipped, verdict};
use crate::random::Random;

const PART: &str = "probe";
/// Warps of all blocks.
const WARPS: usize = 4096;
const LANES: usize = 32;
/// Numbers of a row of a panel of b (kernels/hopper.cuh).
const PANEL: usize = 64;

/// Which of the numbers of a and b are zero.
#[derive(Clone, Copy)]
enum Zeros {
    AllOfA,
    AllOfB,
    /// Rows 0 to 7 of each warp. Only the numbers of c in these rows are compared.
    HalfOfA,
}

/// An instruction that adds a product to c, with a and c in registers.
#[derive(Clone, Copy)]
enum Instruction {
    Mma,
    /// With b of 16 rows of this many numbers in shared memory, as for values in
    /// kernels/attention_hopper.cu.
    Wgmma(usize),
}

impl Instruction {
    fn name(self) -> String {
        match self {
            Instruction::Mma => "mma".into(),
            Instruction::Wgmma(width) => format!("wgmma_{width}"),
        }
    }

    /// Registers of a lane: of a, of b in memory, and of c. The layout of a and c is the same for both.
    fn registers(self) -> [usize; 3] {
        match self {
            Instruction::Mma => [4, 2, 4],
            Instruction::Wgmma(width) => [4, width / 16, width / 2],
        }
    }

    fn warps_per_block(self) -> usize {
        if matches!(self, Instruction::Mma) { 1 } else { 4 }
    }
}

pub fn check() -> Result<()> {
    check_all(&[Instruction::Mma], MMA_HEADER, mma)?;
    match capability()? {
        (9, 0) => check_all(&[Instruction::Wgmma(64), Instruction::Wgmma(128)], WGMMA_HEADER, wgmma),
        (major, minor) => {
            skipped(PART, "wgmma", &format!("devices of compute capability {major}.{minor} have no wgmma"));
            Ok(())
        }
    }
}

fn check_all(instructions: &[Instruction], header: &str, kernel: impl Fn(Instruction, &str) -> String) -> Result<()> {
    for &instruction in instructions {
        for (dtype, largest) in [("bf16", bf16::MAX.to_bits()), ("f16", f16::MAX.to_bits())] {
            let probe = Probe::open(instruction, [header, &kernel(instruction, dtype)].concat())?;
            for (zeros, name) in [(Zeros::AllOfA, "a is 0"), (Zeros::AllOfB, "b is 0"), (Zeros::HalfOfA, "half of a is 0")] {
                verdict(PART, &format!("{} in {dtype} returns c if {name}", instruction.name()), probe.returns_c(largest, zeros));
            }
        }
    }
    Ok(())
}

/// Makes the primary context of device 0 current, and returns the compute capability.
fn capability() -> Result<(i32, i32)> {
    use sys::CUdevice_attribute_enum::{CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR};
    result::init()?;
    let device = result::device::get(0)?;
    // SAFETY: the device exists. Its context stays current for the rest of the program.
    unsafe {
        result::ctx::set_current(result::primary_ctx::retain(device)?)?;
        let number = |attribute| result::device::get_attribute(device, attribute);
        Ok((number(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?, number(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?))
    }
}

/// Memory and the kernel of an instruction, in the current context.
struct Probe {
    instruction: Instruction,
    function: sys::CUfunction,
    a: sys::CUdeviceptr,
    b: sys::CUdeviceptr,
    c: sys::CUdeviceptr,
}

impl Probe {
    fn open(instruction: Instruction, code: String) -> Result<Probe> {
        capability()?;
        let code = CString::new(code)?;
        let [a, b, c] = instruction.registers().map(|registers| size_of::<u32>() * WARPS * LANES * registers);
        // SAFETY: the context is current for the rest of the program, which frees nothing.
        unsafe {
            let module = result::module::load_data(code.as_ptr().cast())?;
            let function = result::module::get_function(module, c"probe".into())?;
            Ok(Probe { instruction, function, a: result::malloc_sync(a)?, b: result::malloc_sync(b)?, c: result::malloc_sync(c)? })
        }
    }

    fn returns_c(&self, largest: u16, zeros: Zeros) -> Result<()> {
        let mut random = Random(1);
        let registers = self.instruction.registers();
        let [mut a, mut b] = [0, 1].map(|i| (0..WARPS * LANES * registers[i]).map(|_| pair(&mut random, largest)).collect::<Vec<_>>());
        let c: Vec<u32> = (0..WARPS * LANES * registers[2]).map(|_| finite(&mut random)).collect();
        match zeros {
            Zeros::AllOfA => a.fill(0),
            Zeros::AllOfB => b.fill(0),
            Zeros::HalfOfA => a.iter_mut().step_by(2).for_each(|register| *register = 0),
        }
        let d = self.run(&a, &b, &c)?;
        // The first two of four registers of a lane belong to rows 0 to 7.
        let compared = (0..c.len()).filter(|i| !matches!(zeros, Zeros::HalfOfA) || i % 4 < 2);
        let differing: Vec<usize> = compared.filter(|&i| c[i] != d[i] && !(c[i] << 1 == 0 && d[i] << 1 == 0)).collect();
        let example = |&i: &usize| format!("{} of {} numbers differ, {:#010x} became {:#010x}", differing.len(), c.len(), c[i], d[i]);
        differing.first().map_or(Ok(()), |first| Err(example(first).into()))
    }

    fn run(&self, a: &[u32], b: &[u32], c: &[u32]) -> Result<Vec<u32>> {
        let mut d = vec![0; c.len()];
        let warps = self.instruction.warps_per_block();
        // SAFETY: the buffers have the sizes of the slices, and the kernel reads and writes a number
        // of each for every register of every lane. Copies wait for the kernel.
        unsafe {
            [(self.a, a), (self.b, b), (self.c, c)].into_iter().try_for_each(|(to, from)| result::memcpy_htod_sync(to, from))?;
            let pointers = [self.a, self.b, self.c];
            let mut parameters = [0, 1, 2].map(|i| (&raw const pointers[i]).cast_mut().cast::<c_void>());
            let grid = ((WARPS / warps) as u32, 1, 1);
            result::launch_kernel(self.function, grid, ((warps * LANES) as u32, 1, 1), 0, null_mut(), &mut parameters)?;
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

const MMA_HEADER: &str = ".version 7.0\n.target sm_80\n.address_size 64\n";
const WGMMA_HEADER: &str = ".version 8.0\n.target sm_90a\n.address_size 64\n";

/// PTX that adds a product to c with a tile per warp. The registers of a lane are consecutive in
/// memory.
fn mma(instruction: Instruction, dtype: &str) -> String {
    let multiply = format!(
        "mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32
    {{%z0, %z1, %z2, %z3}}, {{%x0, %x1, %x2, %x3}}, {{%y0, %y1}}, {{%z0, %z1, %z2, %z3}};"
    );
    kernel(instruction.registers(), "  .reg .b32 %y<2>;\n", "  ld.global.v2.b32 {%y0, %y1}, [%b];", &multiply)
}

/// PTX that adds a product to c with a tile per block, which is a warpgroup. It copies its part of b to
/// shared memory, as panels with swizzled rows.
fn wgmma(instruction: Instruction, dtype: &str) -> String {
    let [_, own, sums] = instruction.registers();
    let width = 2 * sums;
    let panel_bytes = 16 * 2 * PANEL;
    // Swizzled rows of 128 bytes, the distance of eight rows, and the distance of panels, in 16 bytes.
    let descriptor = 1u64 << 62 | (1024 / 16) << 32 | (panel_bytes as u64 / 16) << 16;
    let copies: String = (0..own / 4)
        .map(|i| {
            let at = 16 * i;
            format!("\n  ld.global.v4.b32 {{%y0, %y1, %y2, %y3}}, [%b+{at}];\n  st.shared.v4.b32 [%to+{at}], {{%y0, %y1, %y2, %y3}};")
        })
        .collect();
    let load = format!(
        "  mov.u32 %panels, panels;
  mad.lo.u32 %to, %lane, {}, %panels;{copies}
  fence.proxy.async.shared::cta;
  bar.sync 0;
  shr.u32 %panels, %panels, 4;
  cvt.u64.u32 %matrix, %panels;
  or.b64 %matrix, %matrix, {descriptor};",
        4 * own
    );
    let all: Vec<String> = (0..sums).map(|i| format!("%z{i}")).collect();
    let multiply = format!(
        "wgmma.fence.sync.aligned;
  wgmma.mma_async.sync.aligned.m64n{width}k16.f32.{dtype}.{dtype} {{{}}}, {{%x0, %x1, %x2, %x3}}, %matrix, 1, 1, 1, 1;
  wgmma.commit_group.sync.aligned;
  wgmma.wait_group.sync.aligned 0;",
        all.join(", ")
    );
    let registers = format!(
        "  .reg .b32 %y<4>;\n  .reg .b32 %panels, %to;\n  .reg .b64 %matrix;\n  .shared .align 1024 .b8 panels[{}];\n",
        width / PANEL * panel_bytes
    );
    kernel(instruction.registers(), &registers, &load, &multiply)
}

/// The rest of a kernel: it loads the registers %x of a and %z of c, multiplies and stores %z.
fn kernel([_, own, sums]: [usize; 3], registers: &str, load: &str, multiply: &str) -> String {
    let moves = |text: &dyn Fn(usize, String) -> String| -> String {
        (0..sums).step_by(4).map(|i| text(4 * i, format!("{{%z{i}, %z{}, %z{}, %z{}}}", i + 1, i + 2, i + 3))).collect()
    };
    let loads = moves(&|at, four| format!("  ld.global.v4.f32 {four}, [%c+{at}];\n"));
    let stores = moves(&|at, four| format!("  st.global.v4.f32 [%c+{at}], {four};\n"));
    let (bytes, bytes_of_b) = (4 * sums, 4 * own);
    format!(
        "
.visible .entry probe(.param .u64 a, .param .u64 b, .param .u64 c) {{
  .reg .b32 %lane, %block, %threads, %index;
  .reg .b64 %a, %b, %c;
  .reg .b32 %x<4>;
{registers}  .reg .f32 %z<{sums}>;
  mov.u32 %lane, %tid.x;
  mov.u32 %block, %ctaid.x;
  mov.u32 %threads, %ntid.x;
  mad.lo.u32 %index, %block, %threads, %lane;
  ld.param.u64 %a, [a];
  ld.param.u64 %b, [b];
  ld.param.u64 %c, [c];
  mad.wide.u32 %a, %index, 16, %a;
  mad.wide.u32 %b, %index, {bytes_of_b}, %b;
  mad.wide.u32 %c, %index, {bytes}, %c;
  ld.global.v4.b32 {{%x0, %x1, %x2, %x3}}, [%a];
{loads}{load}
  {multiply}
{stores}  ret;
}}
"
    )
}
