//! The division of an engine among several workers.

use std::time::Duration;

use super::{Device, EngineOptions};
use crate::communicator::CommunicatorHandle;
use crate::error::{Error, Result};
use crate::types::parallel::Division;

/// How several workers compute one model. Each is a process or a thread with its own device.
#[derive(Debug, Clone)]
pub struct WorkerOptions {
    /// The numbers of workers.
    pub division: Division,
    /// The connection to the other workers. Needed if there are several.
    pub communicator: Option<CommunicatorHandle>,
    /// Limit of each wait for other workers, also while they load the model.
    pub timeout: Duration,
}

impl Default for WorkerOptions {
    fn default() -> WorkerOptions {
        WorkerOptions { division: Division::default(), communicator: None, timeout: WorkerOptions::DEFAULT_TIMEOUT }
    }
}

impl WorkerOptions {
    /// Default of `timeout`.
    pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);
    /// Maximum of `tensor` and `pipeline`.
    pub const MAX_WORKERS: usize = 1024;
    /// Maximum number of devices of one process.
    pub const MAX_DEVICES: usize = 64;

    /// Makes the communicator belong to the library, when nothing can fail any more.
    pub(crate) fn adopt(&self) {
        self.communicator.iter().for_each(CommunicatorHandle::adopt);
    }

    /// Checks the values together with the other options.
    pub(super) fn validate(&self, options: &EngineOptions) -> Result<()> {
        super::within("tensor_parallel", self.division.tensor, Self::MAX_WORKERS)?;
        super::within("pipeline_parallel", self.division.pipeline, Self::MAX_WORKERS)?;
        if self.timeout.is_zero() {
            return Err(Error::invalid("worker_timeout_ms is 0; give at least 1"));
        }
        self.validate_devices(options)?;
        if options.division()?.workers() > 1 && options.swap_dir.is_some() {
            return Err(Error::unsupported(
                "swap_path is set and several workers divide the model, which keep the host tier in memory; unset swap_path",
            ));
        }
        Ok(())
    }

    /// Checks a list of devices.
    fn validate_devices(&self, options: &EngineOptions) -> Result<()> {
        let devices = options.devices()?;
        let refused = |what: &str| Err(Error::invalid(format!("device is {:?} and {what}", options.device)));
        if devices.len() == 1 {
            return Ok(());
        }
        if devices.iter().any(|device| (*device == Device::Cpu) != (devices[0] == Device::Cpu)) {
            return refused("has CPUs and CUDA devices; all workers compute on the same kind");
        }
        if let Some(again) = (1..devices.len()).find(|&i| devices[i] != Device::Cpu && devices[..i].contains(&devices[i])) {
            return refused(&format!("names device {} twice; give each worker a device of its own", again + 1));
        }
        if self.communicator.is_some() {
            return refused("communicator is set; workers of other processes have one device each, so give one device");
        }
        if options.cpus.is_some() {
            return refused("cpus is set, which is for one worker; leave cpus out");
        }
        options.division().map(|_| ())
    }
}

impl EngineOptions {
    /// Returns the division among workers. By default, all devices divide each layer.
    pub fn division(&self) -> Result<Division> {
        let (devices, division) = (self.devices()?.len(), self.workers.division);
        let Division { tensor, pipeline } = division;
        match devices {
            1 => Ok(division),
            _ if division.workers() == devices => Ok(division),
            _ if tensor == 1 && pipeline > 0 && devices.is_multiple_of(pipeline) => Ok(Division { tensor: devices / pipeline, pipeline }),
            _ => Err(Error::invalid(format!(
                "device names {devices} devices, and tensor_parallel {tensor} times pipeline_parallel {pipeline} is {}; give the same \
                 number, or leave tensor_parallel out",
                division.workers()
            ))),
        }
    }

    /// Returns the options of one of several workers of this process. A budget applies to rank 0.
    pub fn for_device(&self, rank: usize) -> Result<EngineOptions> {
        let mut options = self.clone();
        options.device = self.device.split(',').nth(rank).unwrap_or_default().into();
        options.workers.division = self.division()?;
        options.threads = Some(self.thread_count());
        if rank > 0
            && let Some(budget) = options.budget.take()
        {
            options.kv_bytes = Some(budget.available().1);
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(device: &str, tensor: usize, pipeline: usize) -> EngineOptions {
        let mut options = EngineOptions { device: device.into(), ..EngineOptions::default() };
        options.workers.division = Division { tensor, pipeline };
        options
    }

    #[test]
    fn all_devices_divide_each_layer_by_default() {
        let division = |device, tensor, pipeline| options(device, tensor, pipeline).division();
        assert_eq!(division("cuda:0", 1, 1), Ok(Division { tensor: 1, pipeline: 1 }));
        assert_eq!(division("cpu", 4, 2), Ok(Division { tensor: 4, pipeline: 2 }), "workers of other processes");
        assert_eq!(division("cuda:0,cuda:1", 1, 1), Ok(Division { tensor: 2, pipeline: 1 }));
        assert_eq!(division("cuda:0,cuda:1,cuda:2,cuda:3", 1, 2), Ok(Division { tensor: 2, pipeline: 2 }));
        assert_eq!(division("cuda:0,cuda:1", 1, 2), Ok(Division { tensor: 1, pipeline: 2 }));
        let error = division("cuda:0,cuda:1,cuda:2", 1, 2).unwrap_err();
        assert_eq!(
            error.message(),
            "device names 3 devices, and tensor_parallel 1 times pipeline_parallel 2 is 2; give the same number, or leave tensor_parallel out"
        );
    }

    #[test]
    fn each_worker_of_this_process_has_one_device() {
        let options = EngineOptions { threads: Some(3), ..options("cpu,cpu", 1, 1) };
        let second = options.for_device(1).unwrap();
        assert_eq!(
            (second.device.as_str(), second.threads, second.workers.division),
            ("cpu", Some(3), Division { tensor: 2, pipeline: 1 })
        );
        assert!(second.validate().is_ok());
        let many = (0..65).map(|i| format!("cuda:{i}")).collect::<Vec<_>>().join(",");
        assert_eq!(options_error(&many), "device names 65 devices; give at most 64");
        assert!(options_error("cuda:3,cuda:3").contains("names device 2 twice"));
    }

    fn options_error(device: &str) -> String {
        options(device, 1, 1).validate().unwrap_err().message().to_string()
    }
}
